"""Chats to tokens and back, through the tokenizer and chat template of a Hugging Face model
directory.

Token in, token out: the tokens of a prompt are the first tokens of the same chat when it is
trained; other templates are refused. Does not know files, rewards or weights. transformers is
imported when a renderer is loaded, not with this module.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from tandem.config.episodes import Data
from tandem.data.chat_template import (
    ChatTemplate,
    model_template,
    read_template,
    with_calls,
    with_tools,
)
from tandem.data.unknown_tokens import UnknownTokens
from tandem.model.config_file import CONFIG, read_json
from tandem.model.paths import parts_of, reads_more_than_text
from tandem.model.tokenizer import decode_text, load_tokenizer, require_tokenizer
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import require_no_images
from tandem.runtime.image_tokens import text_tokens
from tandem.types import Array, Message, Problem, Tool

logger = logging.getLogger(__name__)

# any, to see the template's text after it
_ANSWER = "tandem"
_QUESTION = {"role": "user", "content": "a"}
_EXCHANGE = (_QUESTION, {"role": "assistant", "content": _ANSWER})
_CALL = ("tandem", {"x": _ANSWER})
# of a message with calls: its content where it has no text; whether arguments are JSON text
_CallForm = tuple[str | None, bool]
_CALL_FORMS: tuple[_CallForm, ...] = (("", False), ("", True), (None, False))

GENERATION = "generation_config.json"
CHUNK = 1024  # chats tokenized in one call: enough to be fast, and the memory stays small


def load_renderer(model_path: str, template_file: str = "") -> "ChatRenderer":
    """Load the renderer of a model directory or hub name. template_file: a chat template in the
    place of the tokenizer's. Raises UserError without directory, tokenizer or chat template."""
    require_tokenizer(model_path)
    tokenizer = load_tokenizer(model_path)
    template = read_template(template_file) or model_template(model_path, tokenizer)
    if not template:
        raise UserError(
            "the tokenizer has no chat template",
            where=model_path,
            expected="chat_template.jinja beside the tokenizer",
            next=f"copy chat_template.jinja of the model's chat variant into {model_path}, or set "
            "data.chat_template=FILE",
        )
    config = read_json(model_path, CONFIG) or {}
    generation = read_json(model_path, GENERATION)
    eos = (config if generation is None else generation).get("eos_token_id")  # as transformers
    ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    kind = config.get("model_type")
    images = parts_of(kind).prompts(model_path, tokenizer) if reads_more_than_text(kind) else None
    return ChatRenderer(tokenizer, template, ends, template_file or model_path, images)


class ChatRenderer:
    """The renderer of chats for one model. Implements types.Renderer.

    stop_token_ids: the ends of the assistant's turn, by tokenizer, generation_config.json, and the
    chat template itself. Base models name only their end of document in the first two, while their
    template writes another token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        eos_ids: set[int],
        name: str,
        images: Callable[[str, str], Any] | None = None,
    ):
        self.tokenizer, self.name = tokenizer, name
        if tokenizer.is_fast:  # its file may pad and truncate
            tokenizer.backend_tokenizer.no_padding()
            tokenizer.backend_tokenizer.no_truncation()
        self.template = ChatTemplate(template, name)
        self._images = images and images(template, self.template.where)
        self._answers: dict[tuple[str, ...], int] = {}  # how often an exchange has _ANSWER
        ends = self._end_of_turn(_EXCHANGE)
        if self._call_form:  # some end a turn with calls by another token
            ends |= self._end_of_turn(called([_CALL]))
        self.stop_token_ids = tuple(sorted(eos_ids | ends))
        self.vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        if not self.stop_token_ids:
            raise UserError(
                "nothing ends the assistant's turn",
                where=name,
                expected="an end-of-sequence token",
                next="name the eos_token in tokenizer_config.json",
            )

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        """Return int64 [T] of every chat and the header of the assistant's turn."""
        return self.encode_all(self.texts(chats, open_turn=True, tools=tools), chats)

    def encode(self, text: str) -> Array:
        """Return int64 [T]: the tokens of a text that the template wrote."""
        return self.encode_all([text])[0]

    def turn(self, messages: Sequence[Message]) -> Array:
        """Return int64 [T]: the tokens after an assistant's text when these messages answer it.
        They are the stop token of its turn, the messages, and the header of the assistant's next
        turn. They do not depend on the chat before."""
        results = takewhile(lambda m: m["role"] == "tool", messages)
        answered = tuple(m.get("name") or "tool" for m in results)
        if answered and self._call_form:
            with suppress(UserError):  # a template may write one call a turn only
                return self._after(answered, messages)
        return self._after((), messages)

    def _after(self, names: tuple[str, ...], messages: Sequence[Message]) -> Array:
        """Return int64 [T]: the tokens from the end of a turn on, which called these functions."""
        exchange = called([(name, _CALL[1]) for name in names]) if names else _EXCHANGE
        count = len(names)
        results = [m | {"tool_call_id": _call_id(n)} for n, m in enumerate(messages[:count])]
        if names not in self._answers:
            [alone] = self.texts([exchange], open_turn=False)
            self._answers[names] = alone.count(_ANSWER)
        [text] = self.texts([[*exchange, *results, *messages[count:]]], open_turn=True)
        tail = text.split(_ANSWER, self._answers[names])[-1]
        [tokens] = self.encode_all([tail], [messages])
        return tokens[self.end_of_sampling(tokens, 0, len(tokens), 1) - 1 :]

    def chats(self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()) -> list[Array]:
        """Return int64 [T] of every whole chat, as the template writes it."""
        return self.encode_all(self.texts(chats, open_turn=False, tools=tools), chats)

    def difference(
        self, messages: Sequence[Message], tokens: Array, tools: Sequence[Tool] = ()
    ) -> str:
        """Describe the first difference between the template's rendering of a whole chat and an
        episode's tokens; empty if there is none."""
        [rendered] = self.chats([messages], tools)
        at = first_difference(rendered, tokens)
        if at == len(tokens):
            return ""
        ours, theirs = self.around(tokens, at), self.around(rendered, at)
        return f"token {at}: the episode has {ours}, the chat template writes {theirs}"

    def decode(self, tokens: Array) -> str:
        """Return the text of the tokens, without special tokens."""
        return decode_text(self.tokenizer, tokens)

    def check_lengths(
        self,
        problems: Sequence[Problem],
        config: Data,
        *,
        key: str = "data.train",
        room: int | None = None,
    ) -> tuple[list[Problem], list[int]]:
        """Return the problems whose prompt fits data.max_prompt_tokens, and the tokens of each; a
        longer one is an error, or dropped and reported.

        room: tokens that the model can place before a completion, if known; a larger limit than
        that is not advised.
        """
        limit = config.max_prompt_tokens
        lengths = self._prompt_lengths(problems, key)
        kept = [p for p, length in zip(problems, lengths, strict=True) if length <= limit]
        if len(kept) == len(problems):
            return kept, lengths
        dropped = len(problems) - len(kept)
        what = (
            f"{dropped} of {len(problems)} prompts of {key} are longer than data.max_prompt_tokens"
        )
        longest = int(np.argmax(lengths))
        found = f"{lengths[longest]:,} tokens in {problems[longest].uid!r}, the longest"
        if kept and config.long_prompts == "drop":
            logger.warning("%s and were dropped (%s)", what, found)
            return kept, [length for length in lengths if length <= limit]
        fits = room is None or lengths[longest] <= room
        advice = [f"data.max_prompt_tokens={lengths[longest]}"] if fits else []
        advice += ["data.long_prompts=drop"] if kept else []
        model = "" if fits else f", and the model can place {room:,} before a completion"
        raise UserError(
            what,
            where="data.max_prompt_tokens",
            found=found,
            expected=f"at most {limit:,} tokens{model}",
            next=" or ".join(advice) or "shorter prompts, or another model",
        )

    # ---- text and tokens

    def _prompt_lengths(self, problems: Sequence[Problem], key: str) -> list[int]:
        """Return the tokens of every prompt."""
        unknown, lengths = UnknownTokens(self.tokenizer), list[int]()
        for at in range(0, len(problems), CHUNK):
            chats = [problem.messages for problem in problems[at : at + CHUNK]]
            texts = self.texts(chats, open_turn=True)
            rows = self.encode_all(texts, chats)
            unknown.look(texts, rows)
            lengths += map(len, rows)
        unknown.warn("prompts", key)
        return lengths

    def texts(
        self,
        chats: Sequence[Sequence[Message]],
        open_turn: bool,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Render every chat as it is; open_turn: with the header of the assistant's turn;
        variables: more for the template, or in the place of special tokens. A template without
        tools gets them in a system message; one without `tool_calls` gets them in the content of
        their message."""
        if any("tool_calls" in message for messages in chats for message in messages):
            chats = [[self._with_calls(message) for message in messages] for messages in chats]
        if tools and "tools" not in self.template.source:
            chats, tools = [with_tools(messages, tools) for messages in chats], ()
        if self._images:
            chats = self._images.prepare(chats)
        else:
            require_no_images(chats, self.name)
        variables = {"documents": None, **self.tokenizer.special_tokens_map, **(variables or {})}
        return self.template.render(chats, open_turn=open_turn, variables=variables, tools=tools)

    def encode_all(self, texts: list[str], chats: Sequence[Sequence[Message]] = ()) -> list[Array]:
        """Return int64 [T] of texts; chats: those that they show, for their images."""
        if self._images and chats:
            return self._images.encode(texts, chats, self.encode_all)
        # The template writes every special token itself, so the tokenizer adds none.
        if self.tokenizer.is_fast:  # itself: what transformers wraps it in takes as long
            core = self.tokenizer.backend_tokenizer
            rows = core.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(row.ids, np.int64) for row in rows]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, np.int64) for row in ids]

    def _end_of_turn(self, exchange: Sequence[Message]) -> set[int]:
        """Return the template's first added token after what the assistant says, if any."""
        from tandem.model.call_forms import spoken

        [text] = self.texts([exchange], open_turn=False)
        [tail] = self.encode_all([text.rpartition(_ANSWER)[2]])
        added = self.tokenizer.added_tokens_decoder
        ends = [t for t in tail.tolist() if t in added and not spoken(str(added[t]))]
        return set(ends[:1])

    @cached_property
    def _call_form(self) -> _CallForm | None:
        """Find the form in which the template takes a message with calls; None if in none."""
        variables = {"documents": None, **self.tokenizer.special_tokens_map}
        for form in _CALL_FORMS:
            chat = [_QUESTION, _in_form(called([_CALL])[1], form)]
            with suppress(UserError):
                [text] = self.template.render([chat], open_turn=False, variables=variables)
                if _ANSWER in text:
                    return form
        return None

    def _with_calls(self, message: Message) -> Message:
        if "tool_calls" not in message or (form := self._call_form) is None:
            return with_calls(message)
        return _in_form(message, form)

    def end_of_sampling(self, tokens: Array, start: int, end: int, turn: int) -> int:
        """Return the index after the first stop token of a turn's tokens[start:end]."""
        stops = np.flatnonzero((tokens[start:end, None] == self.stop_token_ids).any(1))
        if not len(stops):
            stop_tokens = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
            raise UserError(
                "the chat template does not end the assistant's turn, so the model would never "
                "learn to stop",
                where=f"{self.template.where}, message {turn + 1}",
                found=repr(self.tokenizer.decode(text_tokens(tokens[start:end]).tolist())[-40:]),
                expected=f"a stop token: {', '.join(map(str, stop_tokens))}",
                next="write eos_token after the assistant's content in the template",
            )
        return start + int(stops[0]) + 1

    def around(self, tokens: Array, at: int) -> str:
        near = text_tokens(tokens[max(0, at - 6) : at + 6]).tolist()
        return repr(self.tokenizer.decode(near, clean_up_tokenization_spaces=False))


def _in_form(message: Message, form: _CallForm) -> Message:
    """Return a message with calls in that form."""
    content, as_text = form
    calls = message["tool_calls"]
    if as_text:
        texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
        calls = [
            call | {"function": call["function"] | {"arguments": text}}
            for call, text in zip(calls, texts, strict=True)
        ]
    return message | {"tool_calls": calls, "content": message.get("content") or content}


def called(functions: Sequence[tuple[str, dict[str, Any]]]) -> tuple[Message, Message]:
    """Return a user's message and a turn that calls these functions with these arguments."""
    calls = [
        {"type": "function", "id": _call_id(number), "function": {"name": name, "arguments": own}}
        for number, (name, own) in enumerate(functions)
    ]
    return _QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}


def _call_id(number: int) -> str:
    return f"call{number:05}"  # as Mistral's templates want it


def first_difference(a: Array, b: Array) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
