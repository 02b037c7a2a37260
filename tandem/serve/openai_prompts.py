"""The engine's requests for a body, in slices of work between which others have their turn.

    work = to_requests(body, ...)   # a generator; a slice is at most one prompt or SLICE characters

All that needs no tokenizer is refused before the first token is made: the number of sequences,
texts that cannot fit the context however they are tokenized, token ids. The tokens of a long text
are counted first, and it is refused as soon as they are too many. Knows no threads and no HTTP.
"""

import itertools
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tandem.runtime.rng import address
from tandem.serve.openai_api import ApiError
from tandem.serve.openai_requests import Body, ChatTokenizer, Served
from tandem.types import Array, Request, SamplingParams

SLICE = 1 << 16  # characters that are tokenized in one piece; 0.1 s at most
MAX_SCORES = 1 << 18  # log-probs of prompts in an answer: other requests wait for their passes


class DrawKeys:
    """Addresses of random draws: the same for the same seed, and new ones without a seed."""

    def __init__(self) -> None:
        self._secret, self._count = secrets.token_hex(16), itertools.count()

    def next_keys(self, seed: int | None, choices: int) -> list[int]:
        if seed is None:
            return [address(self._secret, "serve", next(self._count)) for _ in range(choices)]
        return [address(seed, "serve", choice) for choice in range(choices)]


def to_requests(
    body: Body, tokenizer: ChatTokenizer, served: Served, keys: DrawKeys
) -> Generator[None, None, list[Request]]:
    """Make n requests for each prompt, side by side. Raises ApiError and UserError for prompts that
    cannot run."""
    field, count = body.source()
    if count * body.n > served.max_choices:
        raise ApiError(
            400,
            f"{count} prompts with n = {body.n} are more than {served.max_choices} sequences "
            "in one request",
            param="n" if body.n > 1 else field,
        )
    _require_in_vocabulary(body.stop_token_ids, "stop_token_ids", served)
    prompts = body.prompts(tokenizer)
    for prompt in prompts:
        if isinstance(prompt, str):
            _require_text(prompt, field, served)
        else:
            _require_tokens(prompt, field, served)
    mask = None
    if json := body.json_wanted():
        yield
        asking, schema = json
        mask = tokenizer.json_mask(schema, served.vocabulary, asking)
    requests: list[Request] = []
    likeliest, scores = body.prompt_logprobs, 0
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = yield from _tokenize(
                prompt, partial(body.encode, tokenizer=tokenizer), field, served
            )
            _require_tokens(prompt, field, served)
        scores += 0 if likeliest is None else len(prompt) * body.n * (1 + likeliest)
        if scores > MAX_SCORES and count * body.n > 1:
            message = f"prompt_logprobs: at most {MAX_SCORES:,} in one answer; send fewer prompts"
            raise ApiError(400, message, param="prompt_logprobs")
        params = _params(body, prompt, tokenizer, served)
        own = keys.next_keys(body.seed, body.n) if body.draw_key is None else [body.draw_key]
        scoring = replace(params, prompt_logprobs=likeliest)  # once a prompt
        requests += [
            Request(
                key=key,
                prompt=prompt,
                params=params if number else scoring,
                num_sampled=body.draw_start,
                mask=mask and mask.copy(),
            )
            for number, key in enumerate(own)
        ]
    return requests


def _tokenize(
    text: str, encode: Callable[[str], Array], field: str, served: Served
) -> Generator[None, None, Array]:
    """Make the tokens of a text in one piece. Their number is bounded before, in pieces: cuts add
    only a few tokens, so a text with twice as many as the context in pieces is too long."""
    count = 0
    for at in range(0, len(text), SLICE) if len(text) > SLICE else ():
        yield
        count += len(encode(text[at : at + SLICE]))
        if count > 2 * served.context:
            raise _too_long(f"more than {served.context} tokens", field, served)
    yield
    return encode(text)


def _require_text(text: str, field: str, served: Served) -> None:
    if len(text) > served.longest_text:
        raise _too_long(f"{len(text):,} characters", field, served)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{field}: half of a surrogate pair is no text", param=field) from None


def _too_long(found: str, field: str, served: Served) -> ApiError:
    message = f"{field}: {found} leave no room for a completion; the context is {served.context}"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _require_tokens(prompt: Array, field: str, served: Served) -> None:
    if not len(prompt):
        raise ApiError(400, f"{field}: the prompt has no tokens", param=field)
    if len(prompt) >= served.context:
        raise _too_long(f"{len(prompt)} tokens", field, served)
    _require_in_vocabulary(prompt, field, served)


def _require_in_vocabulary(tokens: Sequence[int] | Array, field: str, served: Served) -> None:
    if len(tokens) and np.max(tokens) >= served.vocabulary:
        raise ApiError(
            400, f"{field}: token ids are from 0 to {served.vocabulary - 1}", param=field
        )


def _params(body: Body, prompt: Array, tokenizer: ChatTokenizer, served: Served) -> SamplingParams:
    room = served.context - len(prompt)
    ends = {*body.stop_token_ids, *(() if body.ignore_eos else tokenizer.stop_token_ids)}
    if body.max_tokens is not None and body.max_tokens > room:
        raise ApiError(
            400,
            f"max_tokens: {len(prompt)} tokens of prompt leave {room} of the context of "
            f"{served.context}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    max_new_tokens = body.max_tokens or min(served.default_max_tokens, room)
    if body.min_tokens > max_new_tokens:
        found = f"{body.min_tokens} are more than the {max_new_tokens} that a completion may have"
        raise ApiError(400, f"min_tokens: {found}", param="min_tokens")
    if body.min_tokens and len(ends) >= served.vocabulary:
        message = "min_tokens: every token of the vocabulary ends the completion"
        raise ApiError(400, message, param="min_tokens")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_k=min(body.top_k, served.vocabulary),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        stop=tuple(body.stop),
        stop_token_ids=tuple(sorted(ends)),
        min_tokens=body.min_tokens,
        top_logprobs=body.top_logprobs_wanted() or 0,
    )
