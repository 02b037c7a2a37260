"""Rows with images: every form that data sets have becomes parts that name files of the store; in
tokens they stand as transformers' processors write them."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tandem.data.readers import read_rows
from tandem.data.renderer import load_renderer
from tandem.plugins.offline.loss_mask import training_samples
from tandem.plugins.offline.rows import parse_chat
from tandem.plugins.vision import store
from tandem.plugins.vision.images import TILED
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of, message_text
from tandem.runtime.image_tokens import IMAGE, name_from, name_of
from tests.support.image_models import KINDS, data_uri, picture, save_image_model

A, B = picture(1), picture(2, width=56)
NAMES = [name_of(A), name_of(B)]
TEXT = "How many?"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(A)
    (tmp_path / "pictures/b.png").write_bytes(B)
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    (tmp_path / "pictures/cut.jpg").write_bytes(file.getvalue()[:-40])
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/a.eps", "EPS")
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_image_model(kind, folder / kind) for kind in KINDS}


def problem_of(folder, row):
    (folder / "rows.jsonl").write_text(json.dumps({"answer": "1", **row}) + "\n")
    [problem] = read_problems(str(folder / "rows.jsonl"), Data(), key="data.train")
    return problem


def message(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(value=TEXT):
    return {"type": "text", "text": value}


FILES = ["pictures/a.png", "pictures/b.png"]
FORMS = {  # rows of one chat: both images, then the text
    "images beside a text": {"prompt": TEXT, "images": FILES},
    "places of TRL": {
        "prompt": message({"type": "image"}, {"type": "image"}, text()),
        "images": FILES,
    },
    "marks of verl": {
        "prompt": [{"role": "user", "content": f"<image><image>{TEXT}"}],
        "images": FILES,
    },
    "parts": {"prompt": message(*({"type": "image", "image": f} for f in FILES), text())},
    "OpenAI's parts": {
        "prompt": message(
            *({"type": "image_url", "image_url": {"url": data_uri(data)}} for data in (A, B)),
            text(),
        )
    },
    "objects": {
        "prompt": TEXT,
        "images": [{"bytes": None, "path": FILES[0]}, {"bytes": data_uri(B), "path": None}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_chat(form, folder):
    problem = problem_of(folder, FORMS[form])
    [only] = problem.messages
    assert images_of(problem.messages) == NAMES
    assert [part["type"] for part in only["content"]] == ["image", "image", "text"]
    assert message_text(only) == f"[image][image]{TEXT}"
    assert "images" not in problem.metadata and problem.conversational
    assert [store.get(name) for name in NAMES] == [A, B]


def test_parquet_of_datasets_has_bytes(folder):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "prompt": [TEXT],
            "answer": ["1"],
            "image": pa.array([{"bytes": A, "path": "a.png"}], kind),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    [problem] = read_problems(str(folder / "rows.parquet"), Data(), key="data.train")
    assert images_of(problem.messages) == NAMES[:1]


def test_column_of_another_meaning_stays_metadata(folder):
    problem = problem_of(folder, {"prompt": TEXT, "image": "registry/some-container:1"})
    assert problem.metadata == {"image": "registry/some-container:1"}
    assert problem.messages[0]["content"] == TEXT


def test_chat_to_train_has_its_images(folder):
    row = {"prompt": TEXT, "response": "two", "images": FILES}
    (folder / "chats.jsonl").write_text(json.dumps(row))
    [chat] = read_rows(str(folder / "chats.jsonl"), parse_chat, key="sft.train")
    assert images_of(chat) == NAMES and chat[-1] == {"role": "assistant", "content": "two"}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"images": ["pictures/none.png"]}, "No such file"),
        ({"images": ["rows.jsonl"]}, "bytes that are no image"),
        ({"images": ["data:image/png;base64,?"]}, "a data: URI"),
        ({"images": ["https://example.org/a.png"]}, "fetch the image"),
        ({"images": [7]}, "a path, a data: URI"),
        ({"images": ["a\0.png"]}, "null byte"),
        ({"images": ["pictures/cut.jpg"]}, "bytes that are no image"),
        ({"images": ["pictures/a.eps"]}, "bytes that are no image"),
        (
            {
                "prompt": [
                    {"role": "user", "content": "?"},
                    {"role": "user", "content": [{"type": "image", "image": FILES[0]}]},
                ],
                "images": FILES[:1],
            },
            "others beside it",
        ),
        ({"images": FILES, "prompt": f"<image>{TEXT}"}, "2 images for 1 places"),
        ({"prompt": message({"type": "image"}, text())}, "0 images for 1 places"),
        ({"prompt": message({"type": "video", "video": "a.mp4"}, text())}, 'a part {"type"'),
    ],
)
def test_row_that_cannot_be_used_is_one_error(row, found, folder):
    with pytest.raises(UserError) as caught:
        problem_of(folder, {"prompt": TEXT, **row})
    assert found in str(caught.value) and "rows.jsonl:1" in str(caught.value)


# ---- tokens


def chat(*names):
    return message(*({"type": "image", "image": name} for name in names), text())


def names_in(tokens):
    own = tokens[(tokens >= IMAGE) & (tokens % (1 << 16) == 0)]
    return [name_from(number) for number in ((own - IMAGE) >> 16).tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_processor(kind, models):
    """Qwen's: one placeholder for 2 x 2 patches of 7 pixels. The others': by their own function."""
    renderer = load_renderer(models[kind])
    for data in (A, B):
        store.put(data)
    [tokens] = renderer.prompts([chat(*NAMES)])
    if kind in TILED:
        pieces = ("<fake_token_around_image>", "<image>", "<global-img>")
        written = [get_image_prompt_string(*size, 4, *pieces) for size in ((2, 2), (1, 2))]
    else:
        written = [f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (4, 8)]
    whole = f"<|user|>{''.join(written)}{TEXT}<|end|><|assistant|>"
    placeholder = renderer.tokenizer.convert_tokens_to_ids(
        "<image>" if kind in TILED else "<|image_pad|>"
    )
    expected = renderer.tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert np.where(tokens >= IMAGE, placeholder, tokens).tolist() == expected
    assert names_in(tokens) == NAMES
    assert renderer.decode(tokens).endswith(TEXT)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_on_the_answer_alone(kind, models):
    renderer = load_renderer(models[kind])
    whole = (*chat(NAMES[0]), {"role": "assistant", "content": "two"})
    [(tokens, mask)] = training_samples(renderer, [whole])
    assert renderer.decode(tokens[mask]) == "two" and not (tokens[mask] >= IMAGE).any()


def test_text_for_a_model_that_reads_images_has_none(models):
    for kind in KINDS:
        [tokens] = load_renderer(models[kind]).prompts([[{"role": "user", "content": TEXT}]])
        assert (tokens < IMAGE).all()
