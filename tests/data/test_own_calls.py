"""Calls in a model's own form: rendered by its template, cut out, decoded and read back."""

import logging

import pytest

from tandem.data.own_calls import EXAMPLE, NAME, sampled_turn, unread_calls, warn_of_unread_calls
from tandem.jobs.engines import warn_of_hidden_tags
from tandem.model.tool_calls import read_calls
from tests.support.call_templates import call_marks, call_templates, template_renderer

TEMPLATES = call_templates()
ONE_CALL = {"llama3_1", "llama3_2", "gptoss", "muse_glimmer"}  # templates that write one a turn
# a call's own string cannot hold these: the template does not escape them
UNESCAPED = {"gemma4": {'<|"|>'}, "diffusion_gemma": {'<|"|>'}}
TYPED = {"text": "line\n\n \u00e9<b>{}[1]", "count": -3, "exact": False, "fields": {"k": [1, 'b"']}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_template_writes_are_read_back_byte_for_byte(name):
    renderer = template_renderer(name, TEMPLATES[name])
    for calls in ([EXAMPLE], [TYPED], [{"text": ""}], [EXAMPLE, TYPED]):
        if len(calls) == 1 or name not in ONE_CALL:
            assert NAME in sampled_turn(renderer, calls)
            assert unread_calls(renderer, calls) == "", calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_mark_inside_a_string_is_text(name):
    renderer = template_renderer(name, TEMPLATES[name])
    own = call_marks(TEMPLATES[name])
    unescaped = next((own for start, own in UNESCAPED.items() if name.startswith(start)), set())
    tags = {"</parameter>", "<parameter=a>", "</function>", "<tool_call>", "</tool_call>"}
    for mark in (own | tags) - unescaped:
        assert unread_calls(renderer, [{"text": f"a {mark} b", "count": 1}]) == "", mark


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_follow_a_turn_of_calls_as_the_template_writes_them(name):
    renderer = template_renderer(name, TEMPLATES[name])
    called = {"name": NAME, "arguments": EXAMPLE}
    calls = [{"type": "function", "id": "call00000", "function": called}]
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": NAME, "tool_call_id": "call00000", "content": "RESULT"},
    ]
    [whole] = renderer.prompts([chat])
    answer = renderer.turn([{k: v for k, v in chat[2].items() if k != "tool_call_id"}])
    assert answer[0] in renderer.stop_token_ids
    assert whole[-len(answer) :].tolist() == answer.tolist()


def test_a_call_of_a_template_is_never_content_if_it_is_cut():
    for name, template in TEMPLATES.items():
        text = sampled_turn(template_renderer(name, template), [EXAMPLE])
        whole = read_calls(text, tools=(NAME,)).calls
        for size in range(text.index(NAME) + len(NAME), len(text), 7):
            cut = read_calls(text[:size], tools=(NAME,)).calls
            assert all(call in whole or call.reason for call in cut), text[:size]


def test_a_format_that_is_not_read_is_said_once(caplog):
    renderer = template_renderer("odd", TEMPLATES["qwen3"].replace('{"name": "', '{"do": "'))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_of_unread_calls(renderer)
    [said] = [r.getMessage() for r in caplog.records if "own form are not read" in r.getMessage()]
    assert "chat template of odd" in said


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("qwen3_5_think", {}, "opens <think> in the prompt"),
        ("qwen3_5_think", {"opened": True, "rest": False}, ""),
        ("qwen3", {}, ""),
        ("qwen3", {"tags": ["think", "|im_end|"]}, "<|im_end|> are special tokens"),
    ],
)
def test_tags_that_the_reward_format_cannot_find_are_said(name, options, said, caplog):
    warn_of_hidden_tags(template_renderer(name, call_templates()[name]), **options)
    assert said in caplog.text and bool(caplog.text) == bool(said)
