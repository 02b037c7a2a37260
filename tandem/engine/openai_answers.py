"""Answers in OpenAI's shape: whole, or in pieces as the tokens come. Knows no HTTP server and no engine.

Both are made of the same updates: the pieces' texts, token ids and log-probs joined are those of the whole.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tandem.engine.detokenizer import REPLACEMENT, Detokenizer
from tandem.engine.openai_api import Body, ChatBody, Served, Texts
from tandem.engine.service import Update
from tandem.types import Request

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0  # of filtered tokens: JSON has no infinity, and OpenAI writes this


def new_answer(body: Body, requests: Sequence[Request], texts: Texts, served: Served) -> "Answer":
    kind = _ChatAnswer if isinstance(body, ChatBody) else _CompletionAnswer
    return kind(body, requests, texts, served)


class _Choice:
    """What one choice has got so far."""

    def __init__(self, request: Request, texts: Texts):
        self.detokenizer = Detokenizer(texts.decode, request.params.stop, texts.byte_tokens)
        self.tokens: list[int] = []
        self.weight_versions: list[int] = []
        self.logprobs: list[Json] = []
        self.offset = 0  # of the next token in the text of all tokens
        self.text = ""  # when it has ended, as is finish_reason
        self.finish_reason: str | None = None
        self.begun = False  # a piece of it was sent


class Answer(ABC):
    """One answer in the making. Take every update in, by `piece` or by `take` and `whole`."""

    def __init__(self, body: Body, requests: Sequence[Request], texts: Texts, served: Served):
        self._body, self._texts, self._model = body, texts, served.name
        self._prompts = [request.prompt for request in requests[:: body.n]]
        self._choices = [_Choice(request, texts) for request in requests]
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._head_sent = False

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
    def _token_logprobs(self, choice: _Choice, token: int, logprob: float, top: dict[int, float]) -> Json:
        """The log-probs of one token, nats; choice.offset is where it begins in the text."""

    @abstractmethod
    def _joined(self, logprobs: list[Json]) -> Json:
        """The log-probs of several tokens."""

    # ---- whole and in pieces

    def take(self, update: Update) -> None:
        choice = self._choices[update.choice]
        choice.tokens += update.tokens
        choice.weight_versions += update.weight_versions
        if self._body.top_logprobs_wanted() is not None:
            choice.logprobs += self._logprobs(choice, update)
        if update.completion is not None:
            choice.text, choice.finish_reason = update.completion.text, update.completion.stop_reason

    def whole(self) -> Json:
        """The answer, when every choice has ended."""
        choices = []
        for index, choice in enumerate(self._choices):
            fields = self._whole_choice(choice) | {"index": index, "finish_reason": choice.finish_reason}
            choices.append(fields | self._token_ids(choice.tokens, choice.weight_versions))
        return self._head(self.whole_object) | {"choices": choices, "usage": self._usage()}

    def piece(self, updates: Sequence[Update]) -> Json | None:
        """What the updates of a pass add; None when there is nothing to tell yet."""
        choices = [fields for update in updates if (fields := self._piece_of(update)) is not None]
        if not choices:
            return None
        usage: Json = {"usage": None} if self._body.stream_options.include_usage else {}
        return self._head(self.piece_object) | {"choices": choices} | usage

    def last_piece(self) -> Json | None:
        """The usage, when it was asked for."""
        if not self._body.stream_options.include_usage:
            return None
        return self._head(self.piece_object) | {"choices": [], "usage": self._usage()}

    def _piece_of(self, update: Update) -> Json | None:
        choice = self._choices[update.choice]
        choice.logprobs = []
        self.take(update)
        ended = update.completion is not None
        text = choice.detokenizer.end(choice.text) if ended else choice.detokenizer.add(update.tokens)
        extras = self._token_ids(update.tokens, update.weight_versions)
        if choice.begun and not (text or ended or extras or choice.logprobs):
            return None
        fields = self._piece_choice(choice, text) | {"index": update.choice, "finish_reason": choice.finish_reason}
        choice.begun = True
        return fields | extras

    def _head(self, kind: str) -> Json:
        versions = [choice.weight_versions[-1] for choice in self._choices if choice.weight_versions]
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        head |= {"weight_version": max(versions, default=-1)}
        if self._body.return_token_ids and not self._head_sent:
            prompts = [prompt.tolist() for prompt in self._prompts]
            head |= {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}
        self._head_sent = True
        return head

    def _token_ids(self, tokens: list[int], weight_versions: list[int]) -> Json:
        return {"token_ids": tokens, "weight_versions": weight_versions} if self._body.return_token_ids else {}

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._prompts)
        completion = sum(len(choice.tokens) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, choice: _Choice, update: Update) -> list[Json]:
        rows = []
        tops = update.top or [([], [])] * len(update.tokens)
        for token, logprob, (tokens, logprobs) in zip(update.tokens, update.logprobs, tops, strict=True):
            top = {t: max(value, LEAST_LOGPROB) for t, value in zip(tokens, logprobs, strict=True)}
            rows.append(self._token_logprobs(choice, token, logprob, top))
            choice.offset += len(self._texts.token_text(token))
        return rows

    def _logprobs_field(self, choice: _Choice) -> Json | None:
        return None if self._body.top_logprobs_wanted() is None else self._joined(choice.logprobs)


class _CompletionAnswer(Answer):
    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: _Choice) -> Json:
        return {"text": choice.text, "logprobs": self._logprobs_field(choice)}

    def _piece_choice(self, choice: _Choice, text: str) -> Json:
        return {"text": text, "logprobs": self._logprobs_field(choice)}

    def _token_logprobs(self, choice: _Choice, token: int, logprob: float, top: dict[int, float]) -> Json:
        """The sampled token is among the likeliest ones even where it is not one of them, as OpenAI has it."""
        text = self._texts.token_text
        likeliest: dict[str, float] = {}
        for t, value in [*top.items(), (token, logprob)]:
            likeliest.setdefault(text(t), value)  # tokens of half a character look alike: keep the likelier
        return {
            "tokens": text(token),
            "token_logprobs": logprob,
            "top_logprobs": likeliest,
            "text_offset": choice.offset,
        }

    def _joined(self, logprobs: list[Json]) -> Json:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[name] for row in logprobs] for name in names}


class _ChatAnswer(Answer):
    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: _Choice) -> Json:
        return {"message": {"role": "assistant", "content": choice.text}, "logprobs": self._logprobs_field(choice)}

    def _piece_choice(self, choice: _Choice, text: str) -> Json:
        role = {} if choice.begun else {"role": "assistant"}
        return {"delta": role | {"content": text}, "logprobs": self._logprobs_field(choice)}

    def _token_logprobs(self, choice: _Choice, token: int, logprob: float, top: dict[int, float]) -> Json:
        return self._entry(token, logprob) | {"top_logprobs": [self._entry(t, value) for t, value in top.items()]}

    def _joined(self, logprobs: list[Json]) -> Json:
        return {"content": logprobs}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._texts.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
