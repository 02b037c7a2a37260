"""Answers in OpenAI's shape: full, or in chunks as the tokens come. Knows no HTTP server and no
engine.

Both are made of the same updates: the texts, token ids and log-probs of the chunks, joined, are
those of the full answer. A chunk is of one choice, as OpenAI's are.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, count

from tandem.engine.ending import REPLACEMENT
from tandem.engine.prompt_scores import PromptScores
from tandem.model.tool_calls import Call, split_calls
from tandem.plugins.serve.bodies import Body, ChatBody
from tandem.plugins.serve.detokenizer import Detokenizer, ToolStream
from tandem.plugins.serve.service import Update
from tandem.plugins.serve.texts import RendererTexts
from tandem.serve.openai import ApiError, Json, assistant_message, call_deltas, call_json
from tandem.types import Request

# a token, its log-prob, and the likeliest ones with theirs, nats
SampledToken = tuple[int, float, dict[int, float]]

LEAST_LOGPROB = -9999.0  # of filtered tokens: JSON has no infinity, and OpenAI writes this


def new_answer(
    body: Body, requests: Sequence[Request], tokenizer: RendererTexts, model: str
) -> "Answer":
    if isinstance(body, ChatBody):
        return _ChatAnswer(body, requests, tokenizer, model)
    return _CompletionAnswer(body, requests, tokenizer, model)


class _Choice:
    """Tokens and text of one choice so far."""

    def __init__(self, request: Request, tokenizer: RendererTexts, prompt: int):
        self.prompt, self.mask = prompt, request.mask  # the prompt's number
        self.detokenizer = Detokenizer(tokenizer.decode, request.params.stop, tokenizer.byte_tokens)
        self.tool_stream = ToolStream()
        self.tokens: list[int] = []
        self.weight_versions: list[int] = []
        self.sampled: list[SampledToken] = []  # tokens whose log-probs are not written yet
        self.offset = 0  # of the first of them in the text of all tokens
        # set at the end, as are calls and finish_reason
        self.text = ""
        self.calls: list[Json] = []
        self.finish_reason: str | None = None
        self.started = False  # a chunk of it was sent


class Answer(ABC):
    """An answer in the making, fed with every update: by `chunks`, or by `add` and then `full`."""

    prefix: str
    full_object: str
    chunk_object: str

    def __init__(
        self, body: Body, requests: Sequence[Request], tokenizer: RendererTexts, model: str
    ):
        self._body, self._tokenizer, self._model = body, tokenizer, model
        self._prompts = [request.prompt for request in requests[:: body.n]]
        self._choices = [
            _Choice(request, tokenizer, number // body.n) for number, request in enumerate(requests)
        ]
        self._scores: dict[int, Sequence[PromptScores]] = {}  # by the number of the prompt
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._head_sent, self._version = False, -1  # the newest token's

    # ---- differences of the two endpoints

    @abstractmethod
    def _full_choice(self, choice: _Choice) -> Json:
        """Return the text, and the log-probs under "logprobs"."""

    @abstractmethod
    def _chunk_choice(self, choice: _Choice, text: str) -> Json:
        """Return the same for a chunk, with the new text."""

    @abstractmethod
    def _logprobs(self, sampled: Sequence[SampledToken], offsets: Sequence[int]) -> Json:
        """Make columns of rows; offsets: where each token begins in the text."""

    def _full_fields(self) -> Json:
        """Return more fields of a full answer."""
        return {}

    def _end(self, choice: _Choice, text: str, reason: str) -> None:
        choice.text, choice.finish_reason = text, reason

    def _next_text(self, choice: _Choice, update: Update) -> str:
        """Return the text of a choice that may be sent now."""
        if update.completion is not None:
            return choice.detokenizer.end(choice.text)
        return choice.detokenizer.add(update.tokens)

    # ---- full and in chunks

    def add(self, update: Update) -> None:
        choice = self._choices[update.choice]
        choice.tokens += update.tokens
        choice.weight_versions += update.weight_versions
        self._version = max([self._version, *update.weight_versions])
        if self._body.top_logprobs_wanted is not None:
            tops = (
                dict(zip(*top, strict=True))
                for top in update.top or [([], [])] * len(update.tokens)
            )
            choice.sampled += zip(update.tokens, update.logprobs, tops, strict=True)
        if update.prompt_scores:
            self._scores[choice.prompt] = update.prompt_scores
        if update.completion is not None:
            if (mask := choice.mask) is not None and mask.error:
                raise ApiError(400, f"{mask.field}: {mask.error}", param=mask.field)
            self._end(choice, update.completion.text, update.completion.stop_reason)

    def full(self) -> Json:
        """Return the answer, once every choice has ended."""
        choices = [
            self._full_choice(choice)
            | {"index": index, "finish_reason": choice.finish_reason}
            | self._token_ids(choice.tokens, choice.weight_versions)
            for index, choice in enumerate(self._choices)
        ]
        body = {"choices": choices, "usage": self._usage()}
        return self._head(self.full_object) | self._full_fields() | body

    def chunks(self, updates: Sequence[Update]) -> Iterator[Json]:
        """Yield the chunks that the updates of a pass add, at most one a choice."""
        usage: Json = {"usage": None} if self._body.stream_options.include_usage else {}
        for update in updates:
            choice = self._choices[update.choice]
            self.add(update)
            text = self._next_text(choice, update)
            token_ids = self._token_ids(update.tokens, update.weight_versions)
            if choice.started and not (text or update.completion or token_ids or choice.sampled):
                continue
            fields = self._chunk_choice(choice, text)
            choice.started = True
            fields |= {"index": update.choice, "finish_reason": choice.finish_reason} | token_ids
            yield self._head(self.chunk_object) | usage | {"choices": [fields]}

    def usage_chunk(self) -> Json | None:
        """Return the chunk of the usage, if it was asked for."""
        if not self._body.stream_options.include_usage:
            return None
        return self._head(self.chunk_object) | {"choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        head |= {"weight_version": self._version}
        if self._body.return_token_ids and not self._head_sent:
            prompts = [prompt.tolist() for prompt in self._prompts]
            head |= {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}
        self._head_sent = True
        return head

    def _token_ids(self, tokens: list[int], weight_versions: list[int]) -> Json:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": tokens, "weight_versions": weight_versions}

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._prompts)
        completion = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt_logprobs(self, prompt: int) -> Json:
        """Return the scores of a prompt, if they were asked for, by token id as vLLM has them."""
        if self._body.prompt_logprobs is None:
            return {}
        found: list[Json | None] = [None]  # nothing predicts the first token
        tokens = iter(self._prompts[prompt][1:].tolist())
        for part in self._scores.get(prompt, ()):
            for logprob, rank, *likeliest in zip(*(c.tolist() for c in part), strict=True):
                scores = [(next(tokens), logprob, rank), *zip(*likeliest, count(1), strict=False)]
                found.append(
                    {
                        str(token): {
                            "logprob": max(value, LEAST_LOGPROB),
                            "rank": place,
                            "decoded_token": self._tokenizer.token_text(token),
                        }
                        for token, value, place in scores
                    }
                )
        return {"prompt_logprobs": found}

    def _logprobs_field(self, choice: _Choice) -> Json | None:
        """Take the log-probs that are not written yet."""
        if self._body.top_logprobs_wanted is None:
            return None
        sampled, choice.sampled = choice.sampled, []
        lengths = (len(self._tokenizer.token_text(token)) for token, _, _ in sampled)
        *offsets, choice.offset = accumulate(lengths, initial=choice.offset)
        return self._logprobs(sampled, offsets)


class _CompletionAnswer(Answer):
    prefix, full_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _full_choice(self, choice: _Choice) -> Json:
        scores, text = self._prompt_logprobs(choice.prompt), choice.text
        if self._body.echo:
            prompt = self._prompts[choice.prompt]
            text = self._tokenizer.decode(prompt) + text
            found = zip(prompt.tolist(), scores.get("prompt_logprobs", ()), strict=False)
            rows = [(token, row or {str(token): {"logprob": 0.0}}) for token, row in found]
            choice.sampled[:0] = [
                (token, row[str(token)]["logprob"], {int(t): s["logprob"] for t, s in row.items()})
                for token, row in rows
            ]
        fields = self._chunk_choice(choice, text) | scores
        if self._body.echo and fields["logprobs"]:  # nothing predicts the first token
            for name in ("token_logprobs", "top_logprobs"):
                fields["logprobs"][name][0] = None
        return fields

    def _chunk_choice(self, choice: _Choice, text: str) -> Json:
        return {"text": text, "logprobs": self._logprobs_field(choice)}

    def _logprobs(self, sampled: Sequence[SampledToken], offsets: Sequence[int]) -> Json:
        return {
            "tokens": [self._tokenizer.token_text(token) for token, _, _ in sampled],
            "token_logprobs": [logprob for _, logprob, _ in sampled],
            "top_logprobs": [self._likeliest(*one) for one in sampled],
            "text_offset": offsets,
        }

    def _likeliest(self, token: int, logprob: float, top: dict[int, float]) -> dict[str, float]:
        """Return the likeliest tokens and, as OpenAI has it, the sampled one."""
        likeliest: dict[str, float] = {}
        for t, value in [*top.items(), (token, logprob)]:
            # tokens of half a character look alike: keep the likelier
            likeliest.setdefault(self._tokenizer.token_text(t), max(value, LEAST_LOGPROB))
        return likeliest


def read_forced(text: str) -> tuple[str, list[Call]]:
    """Split an answer held to `calls_schema` into content and calls; one that a stop string has cut
    is content."""
    try:
        return "", [Call(**call) for call in json.loads(text)]
    except ValueError:
        return text, []


class _ChatAnswer(Answer):
    prefix, full_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, requests: Sequence[Request], tokenizer: RendererTexts, model: str
    ):
        super().__init__(body, requests, tokenizer, model)
        self._tools, self._forced = body.callable_tools, body.forces_calls

    def _end(self, choice: _Choice, text: str, reason: str) -> None:
        """Read the calls of a text, unless it is truncated and may hold half a call."""
        choice.text, choice.finish_reason = text, reason
        read = read_forced if self._forced else partial(split_calls, tools=self._tools)
        content, calls = read(text) if reason == "stop" else (text, [])
        if calls:
            choice.text, choice.finish_reason = content, "tool_calls"
            choice.calls = [
                call_json(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
                for call in calls
            ]

    def _next_text(self, choice: _Choice, update: Update) -> str:
        """Return, with tools, the text before what may become a call, and the rest at the end."""
        text = super()._next_text(choice, update)
        if not self._tools:
            return text
        if update.completion is None:
            return choice.tool_stream.add(text)
        return choice.text[len(choice.tool_stream.sent) :]

    def _full_fields(self) -> Json:
        return self._prompt_logprobs(0)

    def _full_choice(self, choice: _Choice) -> Json:
        message = assistant_message(choice.text, choice.calls)
        return {"message": message, "logprobs": self._logprobs_field(choice)}

    def _chunk_choice(self, choice: _Choice, text: str) -> Json:
        delta: Json = ({} if choice.started else {"role": "assistant"}) | {"content": text}
        if choice.calls:
            delta["tool_calls"] = call_deltas(choice.calls)
        return {"delta": delta, "logprobs": self._logprobs_field(choice)}

    def _logprobs(self, sampled: Sequence[SampledToken], offsets: Sequence[int]) -> Json:
        entry = self._entry
        return {
            "content": [
                entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top.items()]}
                for token, logprob, top in sampled
            ]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        text, logprob = self._tokenizer.token_text(token), max(logprob, LEAST_LOGPROB)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }
