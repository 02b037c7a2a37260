"""Reading problems and choosing those of a step. The mistakes of a file are tables: content, then
what must be said."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.config.schema import Data
from tandem.data.mixture import problems_of_step
from tandem.data.problems import read_problems
from tandem.types import Problem
from tests.support.datasets import error_of, jsonl, parquet, read

GOOD = {"prompt": "1 + 1 =", "answer": "2"}
VERL = {
    "data_source": "algebra",
    "prompt": [{"role": "user", "content": "Solve 2x = 6."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0, "uid": "algebra/a"},
}


# ---- what rows mean


def test_a_row_with_text_becomes_a_users_message(tmp_path):
    more = {"level": 1, "note": None}
    asked = ({"role": "user", "content": "1 + 1 ="},)
    expected = Problem(
        uid="sums/1", messages=asked, answer="2", metadata=more, conversational=False
    )
    assert read(jsonl(tmp_path / "sums.jsonl", GOOD | more)) == [expected]


def test_a_row_of_verl_is_read_as_it_is(tmp_path):
    more = VERL | {"reward_model": {"style": "rule"}}
    expected = Problem(
        uid="algebra/a",
        messages=tuple(more.pop("prompt")),
        answer="3",
        category=more.pop("data_source"),
        metadata=more,
    )
    assert read(jsonl(tmp_path / "a.jsonl", VERL)) == [expected]
    assert read(parquet(tmp_path / "a.parquet", VERL)) == [expected]


def test_columns_are_named_by_the_config(tmp_path):
    row = {"question": "1 + 1 =", "label": "2", "kind": "sums", "prompt": "unused"}
    path = jsonl(tmp_path / "q.jsonl", row)
    [problem] = read(path, prompt_column="question", answer_column="label", category_column="kind")
    found = (problem.messages[0]["content"], problem.answer, problem.category)
    assert found == ("1 + 1 =", "2", "sums")
    assert problem.metadata == {"prompt": "unused", "label": "2", "kind": "sums"}


@pytest.mark.parametrize(
    "number", ["3", "-0", "0.10", "3.0", "1e2", "123456789012345678901.5", "1" * 400]
)
def test_a_number_as_answer_keeps_its_exact_text(tmp_path, number):
    [problem] = read(jsonl(tmp_path / "n.jsonl", f'{{"prompt": "?", "answer": {number}}}'))
    assert problem.answer == number
    row = f'{{"prompt": "?", "reward_model": {{"ground_truth": {number}}}}}'
    assert read(jsonl(tmp_path / "v.jsonl", row))[0].answer == number


@pytest.mark.parametrize("value", [{"target": 24, "numbers": [1, 2.5]}, ["2", "é"], [], {}])
def test_an_answer_of_an_object_or_a_list_is_its_json(tmp_path, value):
    rows = [GOOD | {"answer": value}, {"prompt": "?", "reward_model": {"ground_truth": value}}]
    for problem in read(jsonl(tmp_path / "o.jsonl", *rows)):
        assert problem.answer == json.dumps(value, ensure_ascii=False)
        assert problem.metadata == {"raw_answer": value}


def test_uids_come_from_the_column_extra_info_or_the_row(tmp_path):
    first = GOOD | {"uid": "a", "extra_info": {"uid": "b"}}
    second = GOOD | {"uid": None, "extra_info": {"uid": 7}}
    path = jsonl(tmp_path / "f.jsonl", first, second, "", GOOD)
    assert [problem.uid for problem in read(path)] == ["a", "7", "f/3"]


def test_the_system_message_is_added_only_where_none_is(tmp_path):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "?"}]
    path = jsonl(tmp_path / "s.jsonl", GOOD, GOOD | {"prompt": own})
    first, second = read(path, system="Be brief.")
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert list(second.messages) == own


# ---- what is refused: a row. (line 2 of a file, its place, what the error must say)

BAD_LINES = [
    (b'{"prompt": "?", "answer": }', ":2", "broken JSON at column 27"),
    (b'{"prompt": "?", "answer": NaN}', ":2", "found:    NaN"),
    (b'{"prompt": "?", "answer": ' + b"1" * 5000 + b"}", ":2", "5000 digits"),
    (b'{"prompt": "caf\xe9", "answer": "2"}', ":2", "invalid UTF-8"),
    (b'{"prompt": "?", "answer": "\\ud83d"}', ":2", "surrogate"),
    (b"[1, 2]", ":2", "a list of 2"),
    (b'{"question": "?", "answer": "2"}', ":2, prompt", "set data.prompt_column=question"),
    (b'{"question": "?", "label": "2"}', ":2, prompt", "n and set data.answer_column=label"),
    (b'{"q": "?", "label": "2"}', ":2, prompt", "next:     set data.answer_column=label"),
    (b'{"prompt": "?", "solution": "2"}', ":2, answer", "set data.answer_column=solution"),
    (b'{"prompt": "?"}', ":2, answer", "or data.answer_column='' if no reward"),
    (b"{}", ":2, prompt", "an empty row"),
    (b'{"q": "?", "a": "2"}', ":2, prompt", "expected: a column 'prompt' and a column 'answer'"),
    (b'{"prompt": 7, "answer": "2"}', ":2, prompt", "text, or a list of messages"),
    (b'{"prompt": "  ", "answer": "2"}', ":2, prompt", "an empty message"),
    (b'{"prompt": [{"content": "?"}], "answer": "2"}', ":2, prompt[0]", "a message with a 'role'"),
    (b'{"prompt": [{"role": "assistant", "content": "?"}]}', ":2, prompt", "ends with the user's"),
    (b'{"prompt": "?", "answer": true}', ":2, answer", "found:    true"),
    (b'{"prompt": "?", "answer": "2", "uid": true}', ":2, uid", "found:    true"),
    (b'{"prompt": "?", "answer": "2", "uid": "b/1"}', ":2, uid", "as in row 1"),
    (b"[" * 100_000, ":2", "recursion"),
]
NAMES = [line[:60].decode("latin-1") for line, _, _ in BAD_LINES]


@pytest.mark.parametrize(("line", "where", "said"), BAD_LINES, ids=NAMES)
def test_a_bad_row_is_told_with_line_field_and_reason(tmp_path, line, where, said):
    good = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "b.jsonl").write_bytes(good + line + b"\n" + good)
    message = error_of(tmp_path / "b.jsonl")
    assert message.startswith("data.train has a row that cannot be used\n")
    assert f"b.jsonl{where}" in message.splitlines()[1]
    assert said in message


def test_a_parquet_file_damaged_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "d.parquet"
    rows = [GOOD | {"uid": f"{i * 7919 % 5000}-{i}"} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[2000:20000] = bytes(18000)
    path.write_bytes(content)
    assert "cannot be read as Parquet" in error_of(path)


def test_mistakes_come_together_and_equal_ones_are_counted(tmp_path):
    bad = GOOD | {"answer": None}
    path = jsonl(tmp_path / "m.jsonl", "{", bad, GOOD, bad, bad, GOOD | {"prompt": []})
    message = error_of(path)
    assert message.splitlines()[0] == "data.train has 5 rows that cannot be used"
    expected = "found null, expected text, a number, a list or an object"
    assert f"  - {path}:2, answer (and 2 more): {expected}" in message
    assert f"  - {path}:6, prompt: found an empty list" in message


# ---- several sources


def test_rows_of_several_sources_get_different_uids(tmp_path):
    names = {"a/train.jsonl": "a/train.jsonl/1", "b/train.jsonl": "b/train.jsonl/1"}
    names |= {"b/train.json": "train.json/1", "c.jsonl": "c/1"}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl(tmp_path / name, GOOD)
    problems = read_problems([f"{tmp_path}/{name}" for name in names], Data(), key="data.train")
    assert [problem.uid for problem in problems] == list(names.values())


def test_sources_with_weights_become_a_mixture(tmp_path):
    paths = [jsonl(tmp_path / f"{n}.jsonl", *[GOOD] * 3) for n in "ab"]
    mixed = read_problems(paths, Data(), key="data.train", weights=(3.0, 1.0))
    assert list(mixed) == read_problems(paths, Data(), key="data.train")
    assert [problem.uid[0] for problem in problems_of_step(mixed, 5, 8, 0, True)].count("a") == 6
