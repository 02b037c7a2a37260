"""Triton's kernels for models on a GPU.

For a model on a CUDA device. They keep the exact path there: an output row has the same bits
whatever rows stand beside it, so the engine's log-probs are the trainer's. No GPU has run them yet.
Tests run them in Triton's interpreter and compile them for A100, H100 and B200.

    plans.py             the Kernels of a GPU, its plans of attention, a decode layer in 8 launches
    matmul.py            linears, by tiles for the number of rows, all with one order of a sum
    attention.py         attention over the pages of a cache, for decode and for chunks of prompts
    shared_splits.py     the same where samples share the pages of their prompt
    packed_attention.py  attention of packed sequences, with a backward pass
    rowwise.py           norms, rotary embedding, SwiGLU, the write of keys and values
    vocabulary.py        log-probs, entropies, their slopes, and sampling

It plugs in as the kernels of "cuda" in tandem/registry.py. PyTorch's CUDA build brings the package
`triton`.
"""
