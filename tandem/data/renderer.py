"""Chats to tokens and back, through the tokenizer and chat template of a Hugging Face model
directory.

Token in, token out: the tokens of a prompt are the first tokens of the same chat when it is
trained, and a template for which that is not so is refused. Does not know files, rewards or
weights. transformers is imported when a renderer is loaded, not with this module.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tandem.config.schema import Data
from tandem.data.chat_template import ChatTemplate
from tandem.data.template_budget import LONGEST_TEXT, TextTooLong, TooMuchWork
from tandem.model.config_file import read_json
from tandem.model.tokenizer import decode_text, load_tokenizer
from tandem.model.tool_calls import Call, write_calls
from tandem.runtime.errors import UserError
from tandem.types import Array, Message, Problem, Tool

logger = logging.getLogger(__name__)

_SAID = "tandem"
# any, to see what follows
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID})

GENERATION = "generation_config.json"
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
# where a training chat carries loss; see ChatRenderer.training
Loss = Literal["assistant", "last", "all"]
CHUNK = 1024  # chats tokenized in one call: enough to be fast, and the memory stays small

TOOLS_TEXT = (  # as the templates of Hermes and Qwen have it
    "# Tools\n\nYou may call one or more functions. You are provided with function signatures within <tools></tools> XML "
    "tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)

# Templates that print today's date (Llama 3.2, Mistral, SmolLM3) would give a resumed run other
# prompts on the next day. They get Llama's default day instead. `+%}` keeps the template's own
# first newline.
FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format|replace('%d', '26')|replace('%-d', '26')|replace('%b', 'Jul')"
    "|replace('%B', 'July')|replace('%m', '07')|replace('%Y', '2024')|replace('%y', '24')|replace('%A', 'Friday')"
    "|replace('%a', 'Fri')|replace('%H', '00')|replace('%M', '00')|replace('%S', '00') }}{% endmacro +%}"
)


def load_renderer(model_path: str) -> "ChatRenderer":
    """The renderer of a model directory or hub name. Raises UserError without directory, tokenizer
    or chat template."""
    _require_model(model_path)
    tokenizer = load_tokenizer(model_path)
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "the tokenizer has no chat template",
            where=model_path,
            expected="chat_template.jinja beside the tokenizer",
            next=f"copy chat_template.jinja of the instruction-tuned variant of this model into {model_path}",
        ) from None
    return ChatRenderer(tokenizer, template, _eos_ids(model_path, tokenizer), model_path)


def _require_model(model_path: str) -> None:
    """Refuse what is neither a directory with a tokenizer nor can be a hub name, before minutes of
    network retries."""
    directory = Path(model_path)
    if model_path and directory.is_dir():
        # Without these files AutoTokenizer makes an empty tokenizer of the model's family, and says
        # nothing.
        if not any((directory / name).is_file() for name in VOCABULARY_FILES):
            expected = f"one of {', '.join(VOCABULARY_FILES)}"
            advice = f"copy the tokenizer files of the base model into {model_path}"
            raise UserError(
                "the model directory has no tokenizer",
                where=model_path,
                expected=expected,
                next=advice,
            )
        return
    owner = model_path.partition("/")[0]
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model_path) or (
        "/" in model_path and Path(owner).exists()
    ):
        raise UserError(
            "the model directory does not exist",
            where="model.path",
            found=repr(model_path),
            expected="a Hugging Face model directory, or a hub name such as Qwen/Qwen3-0.6B",
            next=f"ls {next(p for p in directory.parents if p.exists())}"
            if model_path
            else "set model.path=DIRECTORY",
        )


def _eos_ids(model_path: str, tokenizer: Any) -> set[int]:
    """The ends of turn that the tokenizer and generation_config.json, which is optional, name."""
    where = f"{model_path}/{GENERATION}"
    eos = (read_json(model_path, GENERATION, where, "generation config") or {}).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    if not all(token is None or type(token) is int for token in ids):
        raise UserError(
            "the generation config cannot be read",
            where=where,
            found=f"eos_token_id {str(eos)[:60]}",
            expected="the number of a token, or a list of them",
        )
    return {tokenizer.eos_token_id, *ids} - {None}


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A chat's text up to some message, and its tokens."""

    text: str
    tokens: Array  # int64 [T]


class ChatRenderer:
    """Renders chats for one model. Implements types.Renderer.

    stop_token_ids: what ends the assistant's turn, by tokenizer, generation_config.json, and the
    chat template itself. Base models name only their end of document in the first two, while their
    template writes another token.
    """

    def __init__(self, tokenizer: Any, template: str, eos_ids: set[int], name: str):
        self.tokenizer, self.name = tokenizer, name
        self._template = FIXED_CLOCK + template if "strftime_now" in template else template
        self._compiled: ChatTemplate | None = None
        self.stop_token_ids = tuple(sorted(eos_ids | self._end_of_turn()))
        if not self.stop_token_ids:
            expected, advice = (
                "an end-of-sequence token",
                "name the eos_token in tokenizer_config.json",
            )
            raise UserError(
                "nothing ends the assistant's turn", where=name, expected=expected, next=advice
            )

    def prompt(self, messages: Sequence[Message]) -> Array:
        """int64 [T]: the chat and the header of the assistant's turn."""
        return self.prompts([messages])[0]

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        """prompt of every chat, tokenized together."""
        return self._encode([self.prompt_text(messages, tools) for messages in chats])

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text of a chat and the header of the assistant's turn. A template that knows no tools
        gets them in a system message; one that knows no `tool_calls` gets them in the content of
        their message."""
        if tools and "tools" not in self._template:
            messages, tools = with_tools(messages, tools), ()
        if "tool_calls" not in self._template:
            messages = [with_calls(message) for message in messages]
        return self._text(messages, open_turn=True, tools=tools)

    def encode(self, text: str) -> Array:
        """int64 [T]: the tokens of a text that the template wrote."""
        return self._encode([text])[0]

    def turn(self, messages: Sequence[Message]) -> Array:
        """int64 [T]: what follows an assistant's text when these messages answer it: the stop token
        that ends its turn, the messages, and the header of the assistant's next turn. It does not
        depend on what came before."""
        chat = [*_EXCHANGE, *messages]
        [tokens] = self._encode([self._text(chat, open_turn=True).partition(_SAID)[2]])
        return tokens[self._end_of_sampling(tokens, 0, len(tokens), 1) - 1 :]

    def chats(self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()) -> list[Array]:
        """int64 [T] of every whole chat, as the template writes it."""
        return self._encode(
            [self._text(messages, open_turn=False, tools=tools) for messages in chats]
        )

    def difference(
        self, messages: Sequence[Message], tokens: Array, tools: Sequence[Tool] = ()
    ) -> str:
        """Where the template's rendering of a whole chat first differs from an episode's tokens;
        empty if nowhere."""
        if tools and "tools" not in self._template:
            messages, tools = with_tools(messages, tools), ()
        [whole] = self.chats([messages], tools)
        at = _first_difference(whole, tokens)
        if at == len(tokens):
            return ""
        return f"token {at}: the episode has {self._around(tokens, at)}, the chat template writes {self._around(whole, at)}"

    def training(
        self, messages: Sequence[Message], loss: Loss = "assistant"
    ) -> tuple[Array, Array]:
        """(tokens int64 [T], loss_mask bool [T]): the whole chat, and which of its tokens carry
        loss.

        "assistant": what the assistant says, in every turn. A turn's loss covers what an engine
        would have sampled: from the end of the turn's header to the first stop token, that one
        included. "last": its last turn only. "all": every token but the first, which nothing
        predicts. Raises UserError where the template does not keep earlier tokens as they were; for
        "last", where it does not keep the last turn's prompt and what that turn says.
        """
        return self.trainings([messages], loss)[0]

    def trainings(
        self, chats: Sequence[Sequence[Message]], loss: Loss = "assistant"
    ) -> list[tuple[Array, Array]]:
        """training of every chat, tokenized together."""
        chunks = [chats[at : at + CHUNK] for at in range(0, len(chats), CHUNK)]
        return [sample for chunk in chunks for sample in self._trainings(chunk, loss)]

    def decode(self, tokens: Array) -> str:
        """The text of the tokens, without special tokens."""
        return decode_text(self.tokenizer, tokens)

    def check_lengths(
        self,
        problems: Sequence[Problem],
        config: Data,
        *,
        key: str = "data.train",
        room: int | None = None,
    ) -> list[Problem]:
        """The problems whose prompt fits data.max_prompt_tokens; a longer one is an error, or
        dropped and reported.

        room: tokens that the model can place before a completion, if known; a larger limit than
        that is not advised.
        """
        lengths = list(self._prompt_lengths(problems))
        kept = [
            p
            for p, length in zip(problems, lengths, strict=True)
            if length <= config.max_prompt_tokens
        ]
        if len(kept) == len(problems):
            return kept
        what = f"{len(problems) - len(kept)} of {len(problems)} prompts of {key} are longer than data.max_prompt_tokens"
        longest = int(np.argmax(lengths))
        found = f"{lengths[longest]:,} tokens in {problems[longest].uid!r}, the longest"
        if config.long_prompts == "error" or not kept:
            fits = room is None or lengths[longest] <= room
            advice = [f"data.max_prompt_tokens={lengths[longest]}"] * fits + [
                "data.long_prompts=drop"
            ] * bool(kept)
            expected = f"at most {config.max_prompt_tokens:,} tokens"
            expected += "" if fits else f", and the model can place {room:,} before a completion"
            next_command = " or ".join(advice) or "shorter prompts, or another model"
            raise UserError(
                what,
                where="data.max_prompt_tokens",
                found=found,
                expected=expected,
                next=next_command,
            )
        logger.warning("%s and were dropped (%s)", what, found)
        return kept

    # ---- text and tokens

    def _text(
        self, messages: Sequence[Message], *, open_turn: bool, tools: Sequence[Tool] = ()
    ) -> str:
        try:
            if self._compiled is None:
                self._compiled = ChatTemplate(self._template)
            special_tokens = self.tokenizer.special_tokens_map
            return self._compiled.render(
                messages, open_turn=open_turn, special_tokens=special_tokens, tools=tools
            )
        except TextTooLong:
            raise UserError(
                "the chat template writes too long a text",
                where=f"chat template of {self.name}",
                expected=f"at most {LONGEST_TEXT:,} characters for a chat",
                next="shorten the chat, or see what the template repeats",
            ) from None
        except TooMuchWork:
            raise UserError(
                "the chat template does not come to an end",
                where=f"chat template of {self.name}",
                found=f"a chat of {len(messages)} messages for which it takes seconds",
                expected="a template whose work grows as its chat does",
                next="shorten the chat, or see what the template repeats",
            ) from None
        # The template is a program from someone else: compiled or run it raises whatever its
        # mistakes are.
        except Exception as error:
            raise UserError(
                "the chat template refuses a chat",
                where=f"chat template of {self.name}",
                found=f"{type(error).__name__}: {error}"[:1000]
                + f"; roles {', '.join(message['role'] for message in messages)}",
                expected="a chat that this model's template can write",
                next="change the chat's roles, or the template",
            ) from None

    def _encode(self, texts: list[str]) -> list[Array]:
        # The template writes every special token itself, so the tokenizer adds none.
        ids = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.array(row, np.int64) for row in ids]

    def _prompt_lengths(self, problems: Sequence[Problem]) -> Iterator[int]:
        for start in range(0, len(problems), CHUNK):
            yield from map(
                len, self.prompts([problem.messages for problem in problems[start : start + CHUNK]])
            )

    def _end_of_turn(self) -> set[int]:
        """The first added token that the template writes after an assistant's text, if any."""
        [tail] = self._encode([self._text(_EXCHANGE, open_turn=False).rpartition(_SAID)[2]])
        return set([t for t in tail.tolist() if t in self.tokenizer.added_tokens_decoder][:1])

    # ---- the loss mask

    def _trainings(
        self, chats: Sequence[Sequence[Message]], loss: Loss
    ) -> list[tuple[Array, Array]]:
        turns = [_assistant_turns(messages)[-1 if loss == "last" else 0 :] for messages in chats]
        texts = [
            self._growing_texts(messages, at) for messages, at in zip(chats, turns, strict=True)
        ]
        tokens = iter(self._encode([text for chat in texts for text in chat]))
        samples = []
        for at, chat in zip(turns, texts, strict=True):
            tokens_of_chat, loss_mask = self._sample(
                at, [_Rendering(text, next(tokens)) for text in chat]
            )
            if loss == "all":
                loss_mask = np.arange(len(tokens_of_chat)) > 0
            samples.append((tokens_of_chat, loss_mask))
        return samples

    def _growing_texts(self, messages: Sequence[Message], turns: list[int]) -> list[str]:
        """The chat up to the header of each of the assistant's turns and up to its end; then the
        whole chat."""
        texts = []
        for i in turns:
            texts += [
                self._text(messages[:i], open_turn=True),
                self._text(messages[: i + 1], open_turn=False),
            ]
        return (
            texts
            if messages[-1]["role"] == "assistant"
            else [*texts, self._text(messages, open_turn=False)]
        )

    def _sample(self, turns: list[int], renderings: list[_Rendering]) -> tuple[Array, Array]:
        """(tokens int64 [T], loss_mask bool [T]) of the last rendering, with loss on what is
        sampled in these turns."""
        for n, (before, after) in enumerate(pairwise(renderings)):
            self._require_prefix(before, after, turns[n // 2], n)
        tokens = renderings[-1].tokens
        loss_mask = np.zeros(len(tokens), bool)
        for n, turn in enumerate(turns):
            start, end = len(renderings[2 * n].tokens), len(renderings[2 * n + 1].tokens)
            loss_mask[start : self._end_of_sampling(tokens, start, end, turn)] = True
        return tokens, loss_mask

    def _end_of_sampling(self, tokens: Array, start: int, end: int, turn: int) -> int:
        """The place behind the first stop token of a turn's tokens[start:end]."""
        stops = np.flatnonzero(np.isin(tokens[start:end], self.stop_token_ids))
        if not len(stops):
            stop_tokens = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
            raise UserError(
                "the chat template does not end the assistant's turn, so the model would never learn to stop",
                where=f"chat template of {self.name}, message {turn + 1}",
                found=repr(self.tokenizer.decode(tokens[start:end].tolist())[-40:]),
                expected=f"a stop token: {', '.join(map(str, stop_tokens))}",
                next="write eos_token after the assistant's content in the template",
            )
        return start + int(stops[0]) + 1

    def _require_prefix(self, before: _Rendering, after: _Rendering, turn: int, n: int) -> None:
        """before's tokens must be after's first tokens; otherwise name the first difference.

        Of the pairs n, even ones add the message of the turn to its header, odd ones add what
        follows it.
        """
        size = len(before.tokens)
        if np.array_equal(before.tokens, after.tokens[:size]):
            return
        if after.text.startswith(before.text):
            what = "a message merges with the chat template's text before it, so its first token is never sampled"
            advice = "strip the spaces and line ends at the start of that message"
        elif n % 2 == 0:
            what = "the chat template writes the assistant's header differently for a prompt and for a whole chat"
            advice = "make the template write the same header with add_generation_prompt as without"
        else:
            what = "the chat template rewrites an earlier turn when a later one follows"
            advice = "keep one assistant message a chat, or make the template leave earlier turns as they were"
        at = _first_difference(before.tokens, after.tokens)
        raise UserError(
            what,
            where=f"chat template of {self.name}, message {turn + 1 if n % 2 == 0 else turn + 2}, token {at}",
            found=self._around(after.tokens, at),
            expected=self._around(before.tokens, at),
            next=advice,
        )

    def _around(self, tokens: Array, at: int) -> str:
        return repr(
            self.tokenizer.decode(
                tokens[max(0, at - 6) : at + 6].tolist(), clean_up_tokenization_spaces=False
            )
        )


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The chat with the tools told in a system message, in Hermes' way, for templates that have no
    place for them."""
    told = TOOLS_TEXT.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, rest = ("", list(messages))
    if rest and rest[0]["role"] == "system":
        first, rest = rest[0]["content"] + "\n\n", rest[1:]
    return [{"role": "system", "content": first + told}, *rest]


def with_calls(message: Message) -> Message:
    """The message with its `tool_calls`, if any, written in its content as models of Hermes' way
    write them."""
    if "tool_calls" not in message:
        return message
    called = [call["function"] for call in message["tool_calls"]]
    calls = [Call(name=function["name"], arguments=function["arguments"]) for function in called]
    content = "\n".join(filter(None, [message["content"], write_calls(calls, "hermes")]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {
        "content": content
    }


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _first_difference(a: Array, b: Array) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
