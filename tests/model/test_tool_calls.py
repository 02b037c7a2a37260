"""Every format is read back as it was written, and what cannot be read is a reason and never an
exception."""

import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.model.tool_calls import BadCall, Call, Reading, read_calls, split_calls
from tests.support.tool_calls import STYLES, as_texts, write_in_style

NOW, ADD = Call(name="now", arguments={}), Call(name="add", arguments={"a": 1})

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments: Call(name=name, arguments=arguments),
    names,
    st.dictionaries(names, values, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(STYLES), st.booleans())
def test_what_is_written_is_read_back(written, style, by_its_name):
    expected = tuple(written)
    if style == "qwen3_coder":  # arguments are texts
        expected = tuple(Call(name=c.name, arguments=as_texts(c), typed=False) for c in written)
    text, known = write_in_style(written, style), {call.name for call in written}
    reading = read_calls(text, style if by_its_name else "auto", known)
    assert reading.calls == expected
    assert (reading.before, reading.after.strip()) == ("", "")


MARKS = """<tool_call> </tool_call> "arguments":{ "parameters": } }} [ ] [add( a= 1 ) ; <think>
</think> <function=add> </function> <parameter=a> </parameter> <|python_tag|> [TOOL_CALLS] NaN
1e999 (((("""
PIECES = (*MARKS.split(), '{"name": "add", ', "\n", '"', "\ud800", "\x00", "9" * 5000)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join),
    st.sampled_from((*STYLES, "auto")),
)
def test_any_text_is_read(text, format):
    reading = read_calls(text, format, {"add"})
    assert all(isinstance(call, Call) or call.reason for call in reading.calls)
    assert reading.calls or reading.before == text


def test_text_before_and_after_the_calls_is_kept_apart():
    text = 'I add.\n<tool_call>\n{"name": "now"}\n</tool_call> and '
    text += '<tool_call>{"name": "now"}</tool_call> done'
    assert read_calls(text) == Reading(before="I add.\n", calls=(NOW, NOW), after=" and  done")


JSON_ANSWERS = [
    '{"answer": 3}',
    '{"name": "add", "parameters": {"a": 1}}',
    '[{"name": "add", "arguments": {}}]',
    "[add(a=1)]",
    "[1]",
]


def test_auto_bare_json_is_a_call_only_of_a_known_tool():
    for text in JSON_ANSWERS:
        assert read_calls(text, "auto", {"other"}).calls == ()
    known = [len(read_calls(text, "auto", {"add"}).calls) for text in JSON_ANSWERS]
    assert known == [0, 1, 1, 1, 0]


def test_llama_calls_with_python_tag_or_semicolons():
    one = '{"type": "function", "name": "add", "parameters": {"a": 1}}'
    assert read_calls(f"{one}; {one}", "llama3") == Reading(before="", calls=(ADD, ADD))
    assert read_calls(f"So: <|python_tag|>{one}") == Reading(before="So: ", calls=(ADD,))


def test_pythonic_arguments_are_literals_and_nothing_is_evaluated():
    text = "[add(a=-1, b=[2, (3.5, 'x')], c={'d': true, 'e': None}), shop.buy()]"
    assert read_calls(text, "pythonic").calls == (
        Call(name="add", arguments={"a": -1, "b": [2, [3.5, "x"]], "c": {"d": True, "e": None}}),
        Call(name="shop.buy", arguments={}),
    )
    values = "__import__('os');1 + 1;open;[x for x in y];f'';b'';1e999;{1: 2};{**a};*a;lambda: 0"
    for evil in values.split(";"):
        assert isinstance(read_calls(f"[add(a={evil})]", "pythonic").calls[0], BadCall), evil
    for evil in ("[add(1)]", "[add(**{})]", "[add(a=1), 3]", "[add(a=1)"):
        assert isinstance(read_calls(evil, "pythonic").calls[-1], BadCall), evil


@pytest.mark.parametrize(
    "text, word",
    [
        ('<tool_call>{"name": "add"}', "</tool_call>"),
        ("<tool_call>", "</tool_call>"),
        ('{"name": "add"}</tool_call>', "<tool_call>"),
        ('<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>', "character 31"),
        ("<tool_call></tool_call>", "character 1"),
        ('<tool_call>{"name": "add"} or so</tool_call>', "between"),
        ("<tool_call>[]</tool_call>", "object"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "character 2"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "twice"),
        ("<tool_call><function=add></tool_call>", "</function></tool_call>"),
        ("<tool_call><function=add>3</function></tool_call>", "between"),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", "</parameter>"),
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>", "</function>"),
        ('{"name": "add", "parameters": {', "character 32"),
        ('[TOOL_CALLS]{"name": "add"}', "JSON list"),
        ("[add(a=1]", "Python list"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(text, word):
    [call] = read_calls(text, "auto", {"add"}).calls
    assert isinstance(call, BadCall) and word in call.reason


GOOD = '<tool_call>{"name": "now"}</tool_call>'


def test_one_bad_call_does_not_hide_the_good_ones_beside_it():
    text = f"{GOOD}<tool_call>{{{GOOD}<tool_call>x y</tool_call>{GOOD}"
    assert [type(call) for call in read_calls(text).calls] == [Call, BadCall, Call, BadCall, Call]


def test_calls_that_are_only_thought_of_are_not_made():
    opened = f"Maybe {GOOD} but no.\n</think>"  # by the template
    for thought in (f"<think>maybe {GOOD}</think>", opened, opened + opened):
        assert read_calls(thought + GOOD) == Reading(before=thought, calls=(NOW,))
    for text in (f"<think>maybe {GOOD}", f"{opened}\nAnswer: 3", f"{opened}<think>again {GOOD}"):
        assert read_calls(text) == Reading(before=text)


def test_a_bare_call_may_stand_behind_prose():
    for text in (
        'Sure.\n{"name": "add", "parameters": {"a": 1}}',
        'I will add.\n[{"name": "add", "arguments": {"a": 1}}]',
        "[add(a=1)]Checking the sum.",
    ):
        assert read_calls(text, tools=("add",)).calls == (ADD,), text


SCHEMA = {
    "on": {"type": "boolean"},
    "n": {"type": ["integer", "null"]},
    "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "l": {"type": "array"},
    "s": {"type": "string"},
}


def test_values_written_as_text_get_the_types_of_the_schema():
    given = {"on": "True", "n": "None", "m": "7", "l": "[True, False]", "s": "7"}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMA}}}
    _, [call] = split_calls(text, [tool])
    assert call.arguments == {"on": True, "n": None, "m": 7, "l": [True, False], "s": "7"}


def test_the_analysis_of_gpt_oss_makes_no_calls():
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>I may call to=functions.f<|channel|>x"
    assert read_calls(f"{thought}assistant{call}").calls == (Call(name="f", arguments={}),)
    assert read_calls(thought).calls == ()


def test_words_that_begin_like_a_mark_are_words():
    for text in ("#include <functional>", "A function call. Action: none, functools, to=5."):
        assert read_calls(text, tools=("add",)) == Reading(before=text)
        assert read_calls(text + GOOD) == Reading(before=text, calls=(NOW,))


MARKED = (  # of families whose templates no package of the tests ships
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "[TOOL_CALLS]add[ARGS]{}",
    "[TOOL_CALLS]add{}",
    '<|tool_call|>[{"name": "add", "arguments": {}}]<|/tool_call|>',
    '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>',
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
)


@pytest.mark.parametrize("text", MARKED)
def test_a_call_is_read_between_the_marks_of_its_family(text):
    [call] = read_calls(text.replace("{}", '{"a": 1}')).calls
    assert (call.name, str(call.arguments["a"])) == ("add", "1")
