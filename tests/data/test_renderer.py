"""Rendering with a byte-level tokenizer made here: 256 bytes, one merge, four special tokens, no
network."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from tandem.config.schema import Data
from tandem.data.renderer import load_renderer
from tandem.plugins.offline.loss_mask import training_samples
from tandem.runtime.errors import UserError
from tandem.types import Problem
from tests.support.byte_models import CHATML, make_model

# Like Qwen3: an empty thought before the last answer only.
FORGETS_THOUGHTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}",
)
# Like DeepSeek-R1: the prompt opens a thought that whole chats do not have.
OPENS_THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
REFUSES = "the chat template refuses a chat"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def text_of(renderer, tokens):
    return renderer.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)


def prompt_of(renderer, messages):
    return renderer.prompts([messages])[0]


def training_of(renderer, messages, loss="assistant"):
    return training_samples(renderer, [messages], loss)[0]


def ids(renderer, *tokens):
    return tuple(sorted(renderer.tokenizer.convert_tokens_to_ids(list(tokens))))


def error_of(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    return str(caught.value)


# ---- prompts


def test_a_prompt_is_what_transformers_makes_of_the_chat(tmp_path):
    renderer = load_renderer(make_model(tmp_path))
    messages = [{"role": "system", "content": "Sei kurz: é"}, user("1 + 1 =\n\n?")]
    tokens = prompt_of(renderer, messages)
    assert tokens.dtype == np.int64
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert tokens.tolist() == expected["input_ids"]
    assert text_of(renderer, tokens).endswith("1 + 1 =\n\n?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_prints_the_same_date_every_day(tmp_path):
    template = "\n{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d %H:%M') }}" + CHATML
    renderer = load_renderer(make_model(tmp_path, template))
    assert text_of(renderer, prompt_of(renderer, [user("?")])).startswith(
        "\n26 Jul 2024|2024-07-26 00:00<|im_start|>"
    )
    assert renderer.tokenizer.chat_template == template, "an exported model keeps its own template"


# ---- the loss mask


def test_loss_is_on_the_assistants_text_and_its_end_of_turn(tmp_path):
    renderer = load_renderer(make_model(tmp_path))
    messages = [user("hi"), assistant("yo"), user("and?"), assistant("bye\n\n!"), user("ok")]
    tokens, loss_mask = training_of(renderer, messages)
    assert (tokens.dtype, loss_mask.dtype, tokens.shape) == (np.int64, bool, loss_mask.shape)
    assert text_of(renderer, tokens[loss_mask]) == "yo<|im_end|>bye\n\n!<|im_end|>"
    whole = renderer.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert tokens.tolist() == whole
    # before a turn stands the engine's prompt
    starts = np.flatnonzero(np.diff(loss_mask.astype(int)) == 1) + 1
    for start, turn in zip(starts, (1, 3), strict=True):
        assert np.array_equal(tokens[:start], prompt_of(renderer, messages[:turn]))


def test_a_template_that_forgets_thoughts_serves_one_turn_only(tmp_path):
    renderer = load_renderer(make_model(tmp_path, FORGETS_THOUGHTS))
    tokens, loss_mask = training_of(renderer, [user("hi"), assistant("yo")])
    assert text_of(renderer, tokens[loss_mask]) == "<think></think>yo<|im_end|>"
    message = error_of(
        training_of, renderer, [user("hi"), assistant("yo"), user("and?"), assistant("bye")]
    )
    assert message.startswith("the chat template rewrites an earlier turn when a later one follows")
    header = len(prompt_of(renderer, [user("hi")]))
    assert f"message 3, token {header}\n" in message
    assert "expected: 'stant\\n<think" in message
    assert "found:    'stant\\nyo<|im_end|>" in message


@pytest.mark.parametrize("after", [[], [user("ok")]], ids=["to the end", "with a message behind"])
def test_the_loss_of_the_last_turn_is_on_that_turn_only(tmp_path, after):
    renderer = load_renderer(make_model(tmp_path))
    messages = [user("hi"), assistant("yo"), user("and?"), assistant("bye\n\n!"), *after]
    tokens, loss_mask = training_of(renderer, messages, "last")
    assert text_of(renderer, tokens[loss_mask]) == "bye\n\n!<|im_end|>"
    assert np.array_equal(tokens[: int(np.argmax(loss_mask))], prompt_of(renderer, messages[:3]))
    assert np.array_equal(tokens, training_of(renderer, messages)[0])


def test_the_last_turn_trains_where_earlier_turns_are_rewritten(tmp_path):
    renderer = load_renderer(make_model(tmp_path, FORGETS_THOUGHTS))
    messages = [user("hi"), assistant("yo"), user("and?"), assistant("bye")]
    tokens, loss_mask = training_of(renderer, messages, "last")
    assert text_of(renderer, tokens[loss_mask]) == "<think></think>bye<|im_end|>"
    assert np.array_equal(
        tokens[~loss_mask][:-1], prompt_of(renderer, messages[:3])
    )  # but for the line end behind the turn
    assert "rewrites an earlier turn" in error_of(training_of, renderer, messages, "all")
    rewritten = error_of(training_of, renderer, [*messages, user("ok")], "last")
    assert "rewrites an earlier turn" in rewritten
    assert "message 5, token" in rewritten


# ---- stop tokens


def test_stop_tokens_come_from_tokenizer_config_and_template(tmp_path):
    one = load_renderer(make_model(tmp_path / "one"))
    assert one.stop_token_ids == ids(one, "<|im_end|>")
    two = load_renderer(make_model(tmp_path / "two", generation={"eos_token_id": [7, 9]}))
    assert two.stop_token_ids == tuple(sorted((7, 9, *ids(two, "<|im_end|>"))))
    (tmp_path / "one/config.json").write_text('{"eos_token_id": [7, 9]}')  # as transformers reads
    assert load_renderer(str(tmp_path / "one")).stop_token_ids == two.stop_token_ids
    (tmp_path / "two/config.json").write_text('{"eos_token_id": 5}')
    assert load_renderer(str(tmp_path / "two")).stop_token_ids == two.stop_token_ids
    # Qwen2.5's base models are like this
    base = load_renderer(make_model(tmp_path / "base", eos="<|end|>"))
    assert base.stop_token_ids == ids(base, "<|im_end|>", "<|end|>")
    tokens, loss_mask = training_of(base, [user("hi"), assistant("yo")])
    assert text_of(base, tokens[loss_mask]) == "yo<|im_end|>"


# ---- prompts that are too long


def problems(*sizes):
    return [Problem(uid=f"p/{n}", messages=(user("x" * n),), answer="") for n in sizes]


def test_too_long_prompts_are_counted_and_the_longest_named(tmp_path):
    renderer = load_renderer(make_model(tmp_path))
    limit = len(prompt_of(renderer, [user("xx")]))
    message = error_of(renderer.check_lengths, problems(1, 3, 9, 2), Data(max_prompt_tokens=limit))
    assert message.startswith("2 of 4 prompts of data.train are longer than data.max_prompt_tokens")
    assert f"{limit + 7} tokens in 'p/9'" in message
    assert f"data.max_prompt_tokens={limit + 7} or data.long_prompts=drop" in message


# ---- models and templates that cannot be used


@pytest.mark.parametrize(
    ("template", "begins", "said"),
    [
        (None, "the tokenizer has no chat template", "next:     copy chat_template.jinja"),
        ("a\n{% if true %}\n{{ messages[0].nothing.more }}{% endif %}", REFUSES, "(line 3)"),
        ("{{ raise_exception('no system') }}", REFUSES, "no system"),
        ("{{ ''.__class__.__mro__ }}", REFUSES, "SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", REFUSES, "OverflowError"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_once(tmp_path, template, begins, said):
    message = error_of(load_renderer, make_model(tmp_path, template))
    assert message.startswith(begins) and said in message


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (OPENS_THOUGHT, ["writes the assistant's header differently", "message 2, token"]),
        (CHATML.replace("<|im_end|>", ""), ["does not end the assistant's turn"]),
    ],
)
def test_a_template_whose_turns_cannot_be_told_apart_is_refused(tmp_path, template, said):
    renderer = load_renderer(make_model(tmp_path, template))
    message = error_of(training_of, renderer, [user("hi"), assistant("yo")])
    assert all(words in message for words in said)


# ---- turns, one after the other

LLAMA = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}<|bos|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|bos|>\n\n{% endif %}"
)
# The user's turn in brackets, the assistant's ended by eos after a space, nothing written as its
# header.
BRACKETS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %} {{ m['content'] }} <|im_end|>"
    "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
# As Qwen's: tool answers next to each other share one user's turn, and the tools stand in the
# system message.
GROUPED_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "<|im_start|>user\n{% endif %}"
    "<tool_response>{{ m['content'] }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def tool(text):
    return {"role": "tool", "content": text}


CONVERSATION = [
    user("q"),
    assistant("one\n"),
    tool("<b> é"),
    tool("again"),
    assistant("tandem"),
    user("tandem\n\n"),
    assistant("x"),
]


def grown(renderer, messages, tools=()):
    """The tokens of a chat as an episode has them: each of the assistant's texts encoded alone, and
    turns appended."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    tokens = list(renderer.prompts([messages[: turns[0]]], tools)[0])
    for n, i in enumerate(turns):
        tokens += renderer.tokenizer(messages[i]["content"], add_special_tokens=False)["input_ids"]
        if i + 1 < len(messages):
            tokens += list(renderer.turn(messages[i + 1 : turns[n + 1]]))
    return np.array([*tokens, renderer.tokenizer.eos_token_id])


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA, GROUPED_TOOLS], ids=["chatml", "llama", "grouped"]
)
def test_appended_turns_equal_the_chat_of_the_template(tmp_path, template):
    renderer = load_renderer(make_model(tmp_path, template))
    messages = (
        CONVERSATION
        if template is not LLAMA
        else [{**m, "content": m["content"].strip()} for m in CONVERSATION]
    )
    for end in (2, 5, 7):
        chat = messages[:end]
        assert renderer.difference(chat, grown(renderer, chat)) == ""
        whole, _ = training_of(renderer, chat, loss="all")
        assert np.array_equal(whole[: len(grown(renderer, chat))], grown(renderer, chat))


def test_tools_without_a_place_are_in_the_system_message(tmp_path):
    renderer = load_renderer(make_model(tmp_path / "a", GROUPED_TOOLS))
    assert text_of(renderer, renderer.prompts([[user("q")]], [TOOL])[0]).startswith(
        '<|im_start|>system\n[{"type"'
    )
    assert renderer.difference(CONVERSATION, grown(renderer, CONVERSATION, [TOOL]), [TOOL]) == ""
    plain = load_renderer(make_model(tmp_path / "b"))
    for chat in ([user("q")], [{"role": "system", "content": "Be kind."}, user("q")]):
        text = text_of(plain, plain.prompts([chat], [TOOL])[0])
        assert text.count("<|im_start|>system\n") == 1
        assert json.dumps(TOOL) in text
        assert "<tool_call>" in text
        assert text.startswith(
            "<|im_start|>system\n" + "Be kind.\n\n" * (len(chat) - 1) + "# Tools"
        )
    assert plain.difference(CONVERSATION, grown(plain, CONVERSATION, [TOOL]), [TOOL]) == ""


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (FORGETS_THOUGHTS, [user("q"), assistant("a"), user("r"), assistant("b")]),
        (OPENS_THOUGHT, CONVERSATION[:2]),
        (BRACKETS, CONVERSATION[:2]),
    ],
    ids=["forgets", "opens", "brackets"],
)
def test_the_first_difference_to_the_template_is_named(tmp_path, template, chat):
    renderer = load_renderer(make_model(tmp_path, template))
    tokens = grown(renderer, chat)
    [whole] = renderer.chats([chat])
    at = next(n for n, (a, b) in enumerate(zip(whole, tokens, strict=False)) if a != b)
    assert renderer.difference(chat, tokens).startswith(f"token {at}: the episode has '")
