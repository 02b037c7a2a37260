"""Chats to tokens and back, through the tokenizer and chat template of a Hugging Face model
directory.

Token in, token out: the tokens of a prompt are the first tokens of the same chat when it is
trained; other templates are refused. Does not know files, rewards or weights. transformers is
imported when a renderer is loaded, not with this module.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np

from tandem.config.schema import Data
from tandem.data.chat_template import (
    ChatTemplate,
    model_template,
    read_template,
    with_calls,
    with_tools,
)
from tandem.data.prompt_columns import NOTHING, TemplateInputs
from tandem.data.unknown_tokens import UnknownTokens
from tandem.model.config_file import CONFIG, read_json
from tandem.model.paths import parts_of, reads_more_than_text
from tandem.model.tokenizer import (
    decode_text,
    has_at_most_a_token_a_byte,
    load_tokenizer,
    require_tokenizer,
)
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import require_no_images
from tandem.runtime.image_tokens import text_tokens
from tandem.types import Array, Message, Problem, Tool

logger = logging.getLogger(__name__)

# any, to see the template's text after it
_ANSWER = "tandem"
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})

GENERATION = "generation_config.json"
# the part of a training chat that carries loss; see ChatRenderer.training_samples
Loss = Literal["assistant", "last", "all"]
Prefix = tuple[Sequence[Message], bool]  # a chat, with the header of the assistant's turn
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
    ends = _eos_ids(model_path, tokenizer)
    kind = (read_json(model_path, CONFIG) or {}).get("model_type")
    images = parts_of(kind).prompts(model_path, tokenizer) if reads_more_than_text(kind) else None
    return ChatRenderer(tokenizer, template, ends, template_file or model_path, images)


def _eos_ids(model_path: str, tokenizer: Any) -> set[int]:
    """Collect the ends of turn that the tokenizer and generation_config.json name; without that
    file, as in transformers, those of config.json."""
    file, what = GENERATION, "generation config"
    if (values := read_json(model_path, file, what=what)) is None:
        file, what = CONFIG, "model's config"
        values = read_json(model_path, file, what=what) or {}
    eos = values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    if not all(token is None or type(token) is int for token in ids):
        raise UserError(
            f"the {what} cannot be read",
            where=f"{model_path}, {file}",
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
        self._template = ChatTemplate(template, name)
        self._images = images and images(template, self._template.where)
        self.stop_token_ids = tuple(sorted(eos_ids | self._end_of_turn()))
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
        return self._encode(self.prompt_texts(chats, tools), chats)

    def prompt_texts(
        self,
        chats: Sequence[Sequence[Message]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Render every chat and the header of the assistant's turn. A template without tools gets
        them in a system message; one without `tool_calls` gets them in the content of their
        message. variables: more for the template, or in the place of special tokens."""
        if "tool_calls" not in self._template.source:
            chats = [[with_calls(message) for message in messages] for messages in chats]
        return self._texts(chats, open_turn=True, tools=tools, variables=variables)

    def encode(self, text: str) -> Array:
        """Return int64 [T]: the tokens of a text that the template wrote."""
        return self._encode([text])[0]

    def turn(self, messages: Sequence[Message]) -> Array:
        """Return int64 [T]: the tokens after an assistant's text when these messages answer it.
        They are the stop token of its turn, the messages, and the header of the assistant's next
        turn. They do not depend on the chat before."""
        chat = [*_EXCHANGE, *messages]
        [text] = self._texts([chat], open_turn=True)
        [tokens] = self._encode([text.partition(_ANSWER)[2]], [messages])
        return tokens[self._end_of_sampling(tokens, 0, len(tokens), 1) - 1 :]

    def chats(self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()) -> list[Array]:
        """Return int64 [T] of every whole chat, as the template writes it."""
        return self._encode(self._texts(chats, open_turn=False, tools=tools), chats)

    def difference(
        self, messages: Sequence[Message], tokens: Array, tools: Sequence[Tool] = ()
    ) -> str:
        """Describe the first difference between the template's rendering of a whole chat and an
        episode's tokens; empty if there is none."""
        [rendered] = self.chats([messages], tools)
        at = _first_difference(rendered, tokens)
        if at == len(tokens):
            return ""
        ours, theirs = self._around(tokens, at), self._around(rendered, at)
        return f"token {at}: the episode has {ours}, the chat template writes {theirs}"

    def training_samples(
        self,
        chats: Sequence[Sequence[Message]],
        loss: Loss = "assistant",
        key: str = "sft.train",
        inputs: Sequence[TemplateInputs] = (),
    ) -> list[tuple[Array, Array]]:
        """Return (tokens int64 [T], loss_mask bool [T]) of every whole chat; the mask marks the
        tokens that carry loss. inputs: what the template reads beside each chat.

        "assistant": the assistant's text, in every turn. A turn's loss covers the tokens that an
        engine would have sampled: from the end of the turn's header to the first stop token, that
        one included. "last": its last turn only. "all": every token but the first, which nothing
        predicts. Raises UserError if the template does not keep earlier tokens as they were; for
        "last", if it does not keep the last turn's prompt and text.
        """
        unknown, samples, at = UnknownTokens(self.tokenizer), [], 0
        for given, alike in groupby(inputs or [NOTHING] * len(chats)):
            end = at + len(list(alike))
            for start in range(at, end, CHUNK):
                chunk = chats[start : min(start + CHUNK, end)]
                samples += self._sample_chunk(chunk, loss, unknown, given)
            at = end
        unknown.warn("chats", key)
        return samples

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
        exact: bool = True,
    ) -> tuple[list[Problem], list[int]]:
        """Return the problems whose prompt fits data.max_prompt_tokens, and the tokens of each; a
        longer one is an error, or dropped and reported.

        room: tokens that the model can place before a completion, if known; a larger limit than
        that is not advised. exact: otherwise a prompt that fits by its bytes is not tokenized, and
        counts as the limit.
        """
        limit = config.max_prompt_tokens
        lengths = self._prompt_lengths(problems, key, 0 if exact else limit)
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

    def _prompt_lengths(self, problems: Sequence[Problem], key: str, short: int) -> list[int]:
        """Return the tokens of every prompt. short: the length of each that has no more bytes,
        unless its tokens could be unknown."""
        unknown = UnknownTokens(self.tokenizer)
        if self._images or unknown.possible or not has_at_most_a_token_a_byte(self.tokenizer):
            short = 0
        lengths: list[int] = []
        for at in range(0, len(problems), CHUNK):
            chats = [problem.messages for problem in problems[at : at + CHUNK]]
            texts = self.prompt_texts(chats)
            is_read = [not short or most_bytes(text) > short for text in texts]
            read = [text for text, needed in zip(texts, is_read, strict=True) if needed]
            rows = self._encode(read, chats)
            unknown.look(read, rows)
            measured = map(len, rows)
            lengths += [next(measured) if needed else short for needed in is_read]
        unknown.warn("prompts", key)
        return lengths

    def _texts(
        self,
        chats: Sequence[Sequence[Message]],
        open_turn: bool,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> list[str]:
        if tools and "tools" not in self._template.source:
            chats, tools = [with_tools(messages, tools) for messages in chats], ()
        if self._images:
            chats = self._images.prepare(chats)
        else:
            require_no_images(chats, self.name)
        variables = {"documents": None, **self.tokenizer.special_tokens_map, **(variables or {})}
        return self._template.render(chats, open_turn=open_turn, variables=variables, tools=tools)

    def _encode(self, texts: list[str], chats: Sequence[Sequence[Message]] = ()) -> list[Array]:
        """Return int64 [T] of texts; chats: those that they show, for their images."""
        if self._images and chats:
            return self._images.encode(texts, chats, self._encode)
        # The template writes every special token itself, so the tokenizer adds none.
        if self.tokenizer.is_fast:  # itself: what transformers wraps it in takes as long
            core = self.tokenizer.backend_tokenizer
            rows = core.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(row.ids, np.int64) for row in rows]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, np.int64) for row in ids]

    def _end_of_turn(self) -> set[int]:
        """Return the first added token that the template writes after an assistant's text, if
        any."""
        [text] = self._texts([_EXCHANGE], open_turn=False)
        [tail] = self._encode([text.rpartition(_ANSWER)[2]])
        return set([t for t in tail.tolist() if t in self.tokenizer.added_tokens_decoder][:1])

    # ---- the loss mask

    def _sample_chunk(
        self,
        chats: Sequence[Sequence[Message]],
        loss: Loss,
        unknown: UnknownTokens,
        given: TemplateInputs,
    ) -> list[tuple[Array, Array]]:
        turns = [[i for i, m in enumerate(chat) if m["role"] == "assistant"] for chat in chats]
        if loss == "last":
            turns = [at[-1:] for at in turns]
        parts = [_prefixes(messages, at) for messages, at in zip(chats, turns, strict=True)]
        renderings = iter(self._renderings([prefix for chat in parts for prefix in chat], given))
        samples, texts = [], []
        for at, chat in zip(turns, parts, strict=True):
            rendered = [next(renderings) for _ in chat]
            tokens, loss_mask = self._sample(at, rendered)
            texts.append(rendered[-1].text)
            if loss == "all":
                loss_mask = np.arange(len(tokens)) > 0
            samples.append((tokens, loss_mask))
        unknown.look(texts, [tokens for tokens, _ in samples])
        return samples

    def _renderings(self, prefixes: list[Prefix], given: TemplateInputs) -> list[_Rendering]:
        """Return the texts and tokens of prefixes."""
        texts = {}
        for open_turn in (True, False):
            chats = [chat for chat, is_open in prefixes if is_open == open_turn]
            texts[open_turn] = iter(self._texts(chats, open_turn, given.tools, given.variables))
        ordered = [next(texts[open_turn]) for _, open_turn in prefixes]
        rows = self._encode(ordered, [chat for chat, _ in prefixes])
        return [_Rendering(*pair) for pair in zip(ordered, rows, strict=True)]

    def _sample(self, turns: list[int], renderings: list[_Rendering]) -> tuple[Array, Array]:
        """Return (tokens int64 [T], loss_mask bool [T]) of the last rendering, with loss on the
        sampled tokens of these turns."""
        for n, (before, after) in enumerate(pairwise(renderings)):
            self._require_prefix(before, after, turns[n // 2], n)
        tokens = renderings[-1].tokens
        loss_mask = np.zeros(len(tokens), bool)
        for n, turn in enumerate(turns):
            start, end = len(renderings[2 * n].tokens), len(renderings[2 * n + 1].tokens)
            loss_mask[start : self._end_of_sampling(tokens, start, end, turn)] = True
        return tokens, loss_mask

    def _end_of_sampling(self, tokens: Array, start: int, end: int, turn: int) -> int:
        """Return the index after the first stop token of a turn's tokens[start:end]."""
        stops = np.flatnonzero(np.isin(tokens[start:end], self.stop_token_ids))
        if not len(stops):
            stop_tokens = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
            raise UserError(
                "the chat template does not end the assistant's turn, so the model would never "
                "learn to stop",
                where=f"{self._template.where}, message {turn + 1}",
                found=repr(self.tokenizer.decode(text_tokens(tokens[start:end]).tolist())[-40:]),
                expected=f"a stop token: {', '.join(map(str, stop_tokens))}",
                next="write eos_token after the assistant's content in the template",
            )
        return start + int(stops[0]) + 1

    def _require_prefix(self, before: _Rendering, after: _Rendering, turn: int, n: int) -> None:
        """Raise UserError with the first difference unless before's tokens are after's first ones.

        Of the pairs n, even ones add the message of the turn to its header, odd ones add the next
        messages.
        """
        if np.array_equal(before.tokens, after.tokens[: len(before.tokens)]):
            return
        if after.text.startswith(before.text):
            what = (
                "a message merges with the chat template's text before it, so its first token is "
                "never sampled"
            )
            advice = "strip the spaces and line ends at the start of that message"
            if not after.text[len(before.text) :][:1].isspace():
                advice = "name a template in data.chat_template that writes no space before it"
        elif n % 2 == 0:
            what = (
                "the chat template writes the assistant's header differently for a prompt and for "
                "a whole chat"
            )
            advice = "make the template write the same header with add_generation_prompt as without"
        else:
            what = "the chat template rewrites an earlier turn when a later one follows"
            advice = "keep one assistant message a chat, or make the template keep earlier turns"
        at = _first_difference(before.tokens, after.tokens)
        raise UserError(
            what,
            where=f"{self._template.where}, message {turn + 1 + n % 2}, token {at}",
            found=self._around(after.tokens, at),
            expected=self._around(before.tokens, at),
            next=advice,
        )

    def _around(self, tokens: Array, at: int) -> str:
        near = text_tokens(tokens[max(0, at - 6) : at + 6]).tolist()
        return repr(self.tokenizer.decode(near, clean_up_tokenization_spaces=False))


def _prefixes(messages: Sequence[Message], turns: list[int]) -> list[Prefix]:
    """Return the chat up to the header of each of the assistant's turns and up to its end; then the
    whole chat."""
    found = [(messages[: i + ended], not ended) for i in turns for ended in (False, True)]
    return found if messages[-1]["role"] == "assistant" else [*found, (messages, False)]


def most_bytes(text: str) -> int:
    """Return how many bytes a text has at most, as it is and in NFC, which is up to thrice as
    long."""
    return len(text) if text.isascii() else 3 * len(text.encode(errors="surrogatepass"))


def _first_difference(a: Array, b: Array) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
