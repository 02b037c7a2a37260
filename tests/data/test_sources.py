"""CSV, Parquet, Hugging Face folders and the hub: the same rows, and every kind of mistake told for
each format."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data import readers
from tandem.model.config_file import check_model, hub_answers
from tandem.runtime.errors import UserError
from tests.support.datasets import error_of, jsonl, read

GOOD = {"prompt": "1 + 1 =", "answer": "2"}
FORMATS = ("jsonl", "csv", "parquet", "arrow")


def write(folder, form, table):
    """A table in a format; the name that data.train would have. "arrow" is what datasets'
    save_to_disk writes."""
    folder.mkdir(exist_ok=True)
    path = folder / (f"rows.{form}" if form != "arrow" else "rows")
    match form:
        case "jsonl":
            jsonl(path, *table.to_pylist())
        case "csv":
            import pyarrow.csv

            pyarrow.csv.write_csv(table, path)
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            datasets.Dataset(table).save_to_disk(path)
    return str(path)


def place(form, row):
    """Return the place that the error for a row names: CSV has a header above its rows."""
    places = {
        "jsonl": f"rows.jsonl:{row}",
        "csv": f"rows.csv:{row + 1}",
        "parquet": f"rows.parquet:row {row}",
    }
    return places.get(form, f"rows:row {row}")


# ---- the same rows


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_problems(tmp_path, form):
    rows = [
        {"prompt": f"{i} + é,\n =", "answer": str(i), "data_source": "sums", "note": 'a "b"'}
        for i in range(2500)
    ]
    problems = read(write(tmp_path, form, pa.Table.from_pylist(rows)))
    for i, (problem, row) in enumerate(zip(problems, rows, strict=True)):
        assert (problem.uid, problem.messages[0]["content"]) == (f"rows/{i + 1}", row["prompt"])
        assert (problem.answer, problem.category) == (row["answer"], "sums")
        assert problem.metadata == {"note": 'a "b"'}


def test_a_folder_of_datasets_is_read_as_datasets_wrote_it(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "reward_model": {"ground_truth": str(i)},
            "extra_info": {"i": i},
        }
        for i in range(300)
    ]
    saved = datasets.Dataset.from_list(rows)
    datasets.disable_progress_bars()
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": saved, "test": saved.select([4])}).save_to_disk(tmp_path / "two")
    expected = [(f"{i}?", str(i), {"extra_info": {"i": i}}) for i in range(300)]
    for name in ("one", "two#train"):
        found = read(tmp_path / name)
        assert [(p.messages[0]["content"], p.answer, p.metadata) for p in found] == expected
    assert [p.uid for p in read(tmp_path / "two#test")] == ["two#test/1"]
    files = readers.source_files(str(tmp_path / "one"), "data.train")
    assert [file.name for file in files] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]


def test_a_folder_of_several_splits_needs_a_choice(tmp_path):
    one = datasets.Dataset.from_list([GOOD])
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "d")
    assert f"next:     data.train='{tmp_path}/d#train'" in error_of(tmp_path / "d")
    assert "found:    no split 'val'" in error_of(tmp_path / "d#val")
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(read(tmp_path / "d")) == 1


def test_decimals_times_and_maps_of_arrow_become_json(tmp_path):
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.table(
        {
            "prompt": ["?"],
            "answer": [Decimal("0.10")],
            "day": [date(2026, 1, 2)],
            "score": [0.5],
            "counts": pa.array([[("a", 1)]], kind),
        }
    )
    [problem] = read(write(tmp_path, "parquet", table))
    assert problem.answer == "0.10"
    assert problem.metadata == {"day": "2026-01-02", "score": 0.5, "counts": [["a", 1]]}


# ---- what formats hide


def compressed(path, content):
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(content)
    return path


@pytest.mark.parametrize("packed", (".gz", ".zst"))
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"prompt": "?", "answer": 2}\n\n{"prompt": "!", "answer": 3}'),
        ("a.json", b'{"prompt": "?", "answer": 2}\n{"prompt": "!", "answer": 3}\n'),
        ("a.csv", b"prompt,answer\n?,2\n!,3\n"),
        ("a.tsv", b"prompt\tanswer\n?\t2\n!\t3\n"),
    ],
)
def test_a_compressed_file_gives_the_rows_of_the_plain_one(tmp_path, name, content, packed):
    (tmp_path / name).write_bytes(content)
    path = compressed(tmp_path / (name + packed), content)
    assert read(path) == read(tmp_path / name)
    assert [problem.uid for problem in read(path)] == ["a/1", "a/2"]
    path.write_bytes(path.read_bytes()[:-9])
    assert f"data.train cannot be read\n  where:    {path}" in error_of(path)


@pytest.mark.parametrize("mark", (",", ";", "\t"))
def test_csv_is_read_with_the_mark_of_its_header(tmp_path, mark):
    lines = [["prompt", "answer", '"a, b; c\td"'], ["1,2;3\t4", '"5,5;5\t5"', ""]]
    lines[1][0] = f'"{lines[1][0]}"'
    (tmp_path / "c.tsv.csv").write_text("\n" + "\n".join(map(mark.join, lines)))
    [problem] = read(tmp_path / "c.tsv.csv")
    assert (problem.messages[0]["content"], problem.answer) == ("1,2;3\t4", "5,5;5\t5")
    assert problem.metadata == {"a, b; c\td": None}


# ---- mistakes in rows, by format


def columns(**wrong):
    """Three rows, in which the second has something else."""
    return pa.table({name: [good, wrong.get(name, good), good] for name, good in GOOD.items()})


@pytest.mark.parametrize("form", ("jsonl", "csv", "parquet"))
def test_a_source_without_rows_is_told(tmp_path, form):
    empty = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    assert "data.train has no rows" in error_of(write(tmp_path, form, empty))


@pytest.mark.parametrize("form", FORMATS)
def test_invalid_utf_8_is_told_with_its_row(tmp_path, form):
    table = columns(prompt="caf\u00e9")
    if form in ("jsonl", "csv"):
        path = Path(write(tmp_path, form, table))
        text = path.read_bytes().replace(b"\\u00e9", b"\xe9").replace(b"\xc3\xa9", b"\xe9")
        path.write_bytes(text)
        assert place(form, 2) in error_of(path) and "invalid UTF-8" in error_of(path)
    else:
        prompts = pa.array([b"?", b"caf\xe9", b"?"], pa.binary()).view(pa.string())
        path = write(tmp_path, form, table.set_column(0, "prompt", prompts))
        assert "can't decode byte 0xe9" in error_of(path)


# ---- mistakes of CSV


@pytest.mark.parametrize(
    ("content", "where", "said"),
    [
        (b"prompt,answer\n?,2\n?\n", ":3", "found:    1 cell\n"),
        (b'prompt,answer\n"a\nb\nc",\n', ":2, answer", "found:    null"),
        (b"prompt,answer\n?,2,3\n", ":2", "found:    3 cells\n  expected: 2, as in the header"),
        (b'prompt,answer\n"a\nb",2\n?\n', ":4", "found:    1 cell\n"),
        (b'prompt,answer\n?,2\n"never, ends\n?,2\n', ":3", "broken CSV: unexpected end of data"),
        (b'prompt,answer\n"a"b,2\n', ":2", "broken CSV: ',' expected after '\"'"),
        (b'prompt;answer\n"a"b;2\n', ":2", "cells with ';' between them"),
        (b"prompt,prompt\n?,2\n", ":1", "a different name for every column"),
        (b"prompt,caf\xe9\n?,2\n", ":2", "invalid UTF-8"),
        (b"prompt,answer\n\n", "", "no rows"),
    ],
)
def test_a_broken_csv_file_is_told_with_its_line(tmp_path, content, where, said):
    (tmp_path / "b.csv").write_bytes(content)
    message = error_of(tmp_path / "b.csv")
    assert f"{tmp_path}/b.csv{where}\n" in message
    assert said in message


# ---- the hub


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("offline")
def test_a_hub_name_that_is_not_cached_offline_is_one_error():
    said = error_of("nobody/nothing:main#train")
    assert "data.train is no file, and no data set that can be had" in said
    assert "where:    data.train, 'nobody/nothing:main'" in said
    with pytest.raises(UserError, match="unset HF_HUB_OFFLINE, which is set"):
        check_model("nobody/nothing")


def test_a_hub_without_an_answer_is_asked_once(offline, monkeypatch, caplog):
    for settings in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    hub_answers.cache_clear()
    assert "data.train, 'nobody/nothing'" in error_of("nobody/nothing")
    with pytest.raises(UserError, match=r"(?s)config.json cannot be read.* set HF_HUB_OFFLINE=1"):
        check_model("nobody/nothing")
    assert "thrown while requesting" not in caplog.text and not hub_answers()


@pytest.mark.usefixtures("offline")
def test_what_load_dataset_finds_is_read_by_split(tmp_path, monkeypatch):
    """load_dataset takes a folder of this name in the working directory for the hub's data set."""
    (tmp_path / "some/sums").mkdir(parents=True)
    for split, answers in (("train", "234"), ("test", "5")):
        rows = [json.dumps(GOOD | {"answer": answer}) for answer in answers]
        (tmp_path / f"some/sums/{split}.jsonl").write_text("\n".join(rows))

    def located(name, key):
        name, _, split = name.partition("#")
        return readers.Source(Path(name), split, True, "")

    monkeypatch.setattr(readers, "_locate", located)
    rows = readers.source_rows("some/sums#train", "data.train")
    found = [(place, values["answer"]) for place, (values, _) in rows]
    assert found == [(":row 1", "2"), (":row 2", "3"), (":row 3", "4")]
    [file] = readers.source_files("some/sums#test", "data.train")
    assert file.suffix == ".arrow"


@pytest.mark.parametrize("name", ["no.jsonl", "nobody/no.csv", "a/b/c", "../up/here"])
def test_a_path_that_is_no_hub_name_is_never_looked_for_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert "which does not exist" in error_of(name)
