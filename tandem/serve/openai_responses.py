"""Answers in OpenAI's shape: whole, or in pieces as the tokens come. Knows no HTTP server and no
engine.

Both are made of the same updates: the pieces' texts, token ids and log-probs joined are those of
the whole. A piece is of one choice, as OpenAI's are. A whole answer is written in slices, so that a
large one holds up nobody.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from tandem.model.tool_calls import split_calls
from tandem.serve.detokenizer import REPLACEMENT, Detokenizer
from tandem.serve.openai_requests import Body, ChatBody, CompletionBody, Served, Texts
from tandem.serve.service import Update
from tandem.types import Request

Json = dict[str, Any]
# a token, its log-prob, and the likeliest ones with theirs, nats
Sampled = tuple[int, float, dict[int, float]]

LEAST_LOGPROB = -9999.0  # of filtered tokens: JSON has no infinity, and OpenAI writes this
ROWS = 64  # of log-probs, written in one piece


def new_answer(body: Body, requests: Sequence[Request], texts: Texts, served: Served) -> "Answer":
    match body:
        case ChatBody():
            return _ChatAnswer(body, requests, texts, served)
        case CompletionBody():
            return _CompletionAnswer(body, requests, texts, served)
    raise TypeError(body)


def write_json(value: object) -> Iterator[str]:
    """Write JSON in small slices. An iterator becomes a list, and its items are made as they are
    written."""
    match value:
        case dict():
            for place, (name, inner) in enumerate(value.items()):
                yield f"{',' if place else '{'}{json.dumps(name)}:"
                yield from write_json(inner)
            yield "}" if value else "{}"
        case Iterator():
            opening = "["
            while rows := list(islice(value, ROWS)):
                yield opening + json.dumps(rows)[1:-1]
                opening = ","
            yield "[]" if opening == "[" else "]"
        case _:
            yield json.dumps(value)


class _Choice:
    """What one choice has got so far."""

    def __init__(self, request: Request, texts: Texts):
        self.detokenizer = Detokenizer(texts.decode, request.params.stop, texts.byte_tokens)
        self.tokens: list[int] = []
        self.weight_versions: list[int] = []
        self.sampled: list[Sampled] = []  # what log-probs are to be written of
        self.offset = 0  # of the first of them in the text of all tokens
        self.text = ""  # when it has ended, as are the calls and finish_reason
        self.calls: list[Json] = []
        self.finish_reason: str | None = None
        self.begun = False  # a piece of it was sent


class Answer(ABC):
    """One answer in the making. Take every update in, by `pieces` or by `take` and `whole`."""

    def __init__(self, body: Body, requests: Sequence[Request], texts: Texts, served: Served):
        self._body, self._texts, self._model = body, texts, served.name
        self._prompts = [request.prompt for request in requests[:: body.n]]
        self._choices = [_Choice(request, texts) for request in requests]
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._head_sent, self._version = False, -1  # the newest token's

    # ---- what the two endpoints do differently

    prefix: str
    whole_object: str
    piece_object: str

    @abstractmethod
    def _whole_choice(self, choice: _Choice) -> Json:
        """The text, and the log-probs under "logprobs"."""

    @abstractmethod
    def _piece_choice(self, choice: _Choice, text: str) -> Json:
        """The same for a piece."""

    @abstractmethod
    def _logprobs(self, sampled: Sequence[Sampled], offsets: Sequence[int]) -> Json:
        """Columns of rows, as iterators; offsets: where each token begins in the text."""

    def _end(self, choice: _Choice, text: str, reason: str) -> None:
        choice.text, choice.finish_reason = text, reason

    def _next_text(self, choice: _Choice, update: Update) -> str:
        """The text that may be sent of a choice now."""
        if update.completion is not None:
            return choice.detokenizer.end(choice.text)
        return choice.detokenizer.add(update.tokens)

    # ---- whole and in pieces

    def take(self, update: Update) -> None:
        choice = self._choices[update.choice]
        choice.tokens += update.tokens
        choice.weight_versions += update.weight_versions
        self._version = max([self._version, *update.weight_versions])
        if self._body.top_logprobs_wanted() is not None:
            tops = (
                dict(zip(*top, strict=True))
                for top in update.top or [([], [])] * len(update.tokens)
            )
            choice.sampled += zip(update.tokens, update.logprobs, tops, strict=True)
        if update.completion is not None:
            self._end(choice, update.completion.text, update.completion.stop_reason)

    def whole(self) -> Iterator[str]:
        """The answer in slices, when every choice has ended."""
        yield json.dumps(self._head(self.whole_object))[:-1] + ', "choices": ['
        for index, choice in enumerate(self._choices):
            yield "," if index else ""
            fields = self._whole_choice(choice) | {
                "index": index,
                "finish_reason": choice.finish_reason,
            }
            yield from write_json(fields | self._token_ids(choice.tokens, choice.weight_versions))
        yield f'], "usage": {json.dumps(self._usage())}}}'

    def pieces(self, updates: Sequence[Update]) -> Iterator[str]:
        """Pieces that the updates of a pass add, one piece a choice that has something to tell."""
        usage: Json = {"usage": None} if self._body.stream_options.include_usage else {}
        for update in updates:
            if (fields := self._piece_of(update)) is not None:
                choice = "".join(write_json(fields))
                yield (
                    json.dumps(self._head(self.piece_object) | usage)[:-1]
                    + f', "choices": [{choice}]}}'
                )

    def last_piece(self) -> str | None:
        """The usage, when it was asked for."""
        if not self._body.stream_options.include_usage:
            return None
        return json.dumps(self._head(self.piece_object) | {"choices": [], "usage": self._usage()})

    def _piece_of(self, update: Update) -> Json | None:
        choice = self._choices[update.choice]
        self.take(update)
        text = self._next_text(choice, update)
        extras = self._token_ids(update.tokens, update.weight_versions)
        if choice.begun and not (text or update.completion or extras or choice.sampled):
            return None
        fields = self._piece_choice(choice, text) | {
            "index": update.choice,
            "finish_reason": choice.finish_reason,
        }
        choice.begun = True
        return fields | extras

    def _head(self, kind: str) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        head |= {"weight_version": self._version}
        if self._body.return_token_ids and not self._head_sent:
            prompts = [prompt.tolist() for prompt in self._prompts]
            head |= {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}
        self._head_sent = True
        return head

    def _token_ids(self, tokens: list[int], weight_versions: list[int]) -> Json:
        return (
            {"token_ids": tokens, "weight_versions": weight_versions}
            if self._body.return_token_ids
            else {}
        )

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._prompts)
        completion = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _logprobs_field(self, choice: _Choice) -> Json | None:
        """The log-probs that were not written yet."""
        if self._body.top_logprobs_wanted() is None:
            return None
        sampled, choice.sampled = choice.sampled, []
        *offsets, choice.offset = accumulate(
            (len(self._texts.token_text(token)) for token, _, _ in sampled), initial=choice.offset
        )
        return self._logprobs(sampled, offsets)


class _CompletionAnswer(Answer):
    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: _Choice) -> Json:
        return self._piece_choice(choice, choice.text)

    def _piece_choice(self, choice: _Choice, text: str) -> Json:
        return {"text": text, "logprobs": self._logprobs_field(choice)}

    def _logprobs(self, sampled: Sequence[Sampled], offsets: Sequence[int]) -> Json:
        return {
            "tokens": (self._texts.token_text(token) for token, _, _ in sampled),
            "token_logprobs": (logprob for _, logprob, _ in sampled),
            "top_logprobs": (self._likeliest(*one) for one in sampled),
            "text_offset": iter(offsets),
        }

    def _likeliest(self, token: int, logprob: float, top: dict[int, float]) -> dict[str, float]:
        """The sampled token is among the likeliest ones even where it is not one of them, as OpenAI
        has it."""
        likeliest: dict[str, float] = {}
        for t, value in [*top.items(), (token, logprob)]:
            # tokens of half a character look alike: keep the likelier
            likeliest.setdefault(self._texts.token_text(t), max(value, LEAST_LOGPROB))
        return likeliest


class _ChatAnswer(Answer):
    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, requests: Sequence[Request], texts: Texts, served: Served):
        super().__init__(body, requests, texts, served)
        self._tools = body.callable_tools

    def _end(self, choice: _Choice, text: str, reason: str) -> None:
        """A text that was cut may hold half a call, and none is read in it."""
        choice.text, choice.finish_reason = text, reason
        content, calls = split_calls(text, self._tools) if reason == "stop" else (text, [])
        if calls:
            choice.text, choice.finish_reason = content, "tool_calls"
            functions = (
                {"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls
            )
            choice.calls = [
                {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                for function in functions
            ]

    def _next_text(self, choice: _Choice, update: Update) -> str:
        """With tools all of it at the end: a text that may become a call cannot be sent as
        content."""
        return choice.text if self._tools else super()._next_text(choice, update)

    def _whole_choice(self, choice: _Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message, "logprobs": self._logprobs_field(choice)}

    def _piece_choice(self, choice: _Choice, text: str) -> Json:
        delta: Json = ({} if choice.begun else {"role": "assistant"}) | {"content": text}
        if choice.calls:
            delta |= {
                "tool_calls": [{"index": index} | call for index, call in enumerate(choice.calls)]
            }
        return {"delta": delta, "logprobs": self._logprobs_field(choice)}

    def _logprobs(self, sampled: Sequence[Sampled], offsets: Sequence[int]) -> Json:
        entry = self._entry
        return {
            "content": (
                entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top.items()]}
                for token, logprob, top in sampled
            )
        }

    def _entry(self, token: int, logprob: float) -> Json:
        text, logprob = self._texts.token_text(token), max(logprob, LEAST_LOGPROB)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }
