"""Models that read images: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, SmolVLM, Idefics3.

For anyone who trains on images and text by GRPO, SFT or distillation. These models run on the
inexact path: each step measures the gap. docs/guide/data.md has the rows.

    image_rows.py      images of rows to parts of a chat, each a file of the run's image store
    store.py           files of images, in the run folder
    images.py          transformers' image processor; places of images in a text, their tokens
    image_model.py     the model: features of an image go into its tokens' embeddings
    tiny_images.py     a tiny model for tests and first steps: `tandem tiny --images`

It plugs in as multimodal_paths, row_parts and tiny_models of tandem/registry.py. Extra: `images`.
"""
