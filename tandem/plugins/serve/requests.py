"""The engine's requests for a body of openai.py.

Knows no threads and no HTTP.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.plugins.serve.bodies import Body, ChatBody, CompletionBody, NamedTool
from tandem.plugins.serve.json_masks import JsonMask, calls_schema, json_mask
from tandem.plugins.serve.texts import RendererTexts
from tandem.runtime.rng import address
from tandem.serve.openai import ApiError
from tandem.types import Array, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model's name and limits. Example: Served(name="demo", context=4096,
    vocabulary=151936, ...)"""

    name: str
    context: int  # tokens, prompt and completion
    vocabulary: int  # token ids are below it
    default_max_tokens: int
    max_choices: int  # of one request, over all its prompts


def to_requests(body: Body, tokenizer: RendererTexts, served: Served) -> list[Request]:
    """Make n requests for each prompt, side by side. Raises ApiError and UserError for prompts that
    cannot run."""
    field, encode = body.source, tokenizer.encode
    texts: Sequence[str | list[int]]
    match body:
        case ChatBody(prompt_token_ids=None):
            messages = [message.model_dump(exclude_none=True) for message in body.messages]
            variables = body.chat_template_kwargs
            texts = [tokenizer.render(messages, body.callable_tools, variables)]
            encode = tokenizer.encode_chat
        case ChatBody(prompt_token_ids=list(tokens)):
            texts = [tokens]
        case CompletionBody():
            texts = body.prompt
        case _:
            raise TypeError(body)
    if len(texts) * body.n > served.max_choices:
        found = f"{len(texts)} prompts with n = {body.n}"
        message = f"{found} are more than {served.max_choices} sequences in one request"
        raise ApiError(400, message, param="n" if body.n > 1 else field)
    _require_in_vocabulary(body.stop_token_ids, "stop_token_ids", served)
    mask = _mask(body, tokenizer, served)
    requests: list[Request] = []
    for text in texts:
        try:
            prompt = encode(text) if isinstance(text, str) else np.array(text, np.int64)
        except (UnicodeEncodeError, TypeError):  # as tokenizers say it
            message = f"{field}: half of a surrogate pair is no text"
            raise ApiError(400, message, param=field) from None
        if not len(prompt):
            raise ApiError(400, f"{field}: the prompt has no tokens", param=field)
        if len(prompt) >= served.context:
            room = f"leave no room for a completion; the context is {served.context}"
            raise _too_long(f"{field}: {len(prompt)} tokens {room}", field)
        _require_in_vocabulary(prompt, field, served)
        params = _params(body, prompt, tokenizer, served)
        scoring = replace(params, prompt_logprobs=body.prompt_logprobs)  # once a prompt
        own = [body.draw_key] if body.draw_key is not None else _keys(body)
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


def _keys(body: Body) -> list[int]:
    """Return the addresses of the draws of n choices: the same for the same seed."""
    if body.seed is None:
        return [secrets.randbits(64) for _ in range(body.n)]
    return [address(body.seed, "serve", choice) for choice in range(body.n)]


def _mask(body: Body, tokenizer: RendererTexts, served: Served) -> JsonMask | None:
    """Compile the mask of the JSON that an answer is to be; None: any text. Raises ApiError."""
    if isinstance(body, ChatBody) and body.forces_calls:
        single = isinstance(body.tool_choice, NamedTool) or not body.parallel_tool_calls
        asking, schema = "tool_choice", calls_schema(body.forced_tools, single=single)
    elif body.response_format is not None:
        asking, schema = "response_format", body.response_format
    else:
        return None
    if body.ignore_eos or body.min_tokens:
        message = f"{asking} ends an answer with its JSON, without ignore_eos and min_tokens"
        raise ApiError(400, message, param=asking)
    return json_mask(tokenizer, schema, served.vocabulary, asking)


def _too_long(message: str, field: str) -> ApiError:
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _require_in_vocabulary(tokens: Sequence[int] | Array, field: str, served: Served) -> None:
    if len(tokens) and np.max(tokens) >= served.vocabulary:
        message = f"{field}: token ids are from 0 to {served.vocabulary - 1}"
        raise ApiError(400, message, param=field)


def _params(body: Body, prompt: Array, tokenizer: RendererTexts, served: Served) -> SamplingParams:
    room = served.context - len(prompt)
    ends = {*body.stop_token_ids, *(() if body.ignore_eos else tokenizer.stop_token_ids)}
    if body.max_tokens is not None and body.max_tokens > room:
        left = f"{len(prompt)} tokens of prompt leave {room} of the context of {served.context}"
        raise _too_long(f"max_tokens: {left}", "max_tokens")
    max_new_tokens = body.max_tokens or min(served.default_max_tokens, room)
    if body.min_tokens > max_new_tokens:
        found = f"{body.min_tokens} are more than the {max_new_tokens} that a completion may have"
        raise ApiError(400, f"min_tokens: {found}", param="min_tokens")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_k=min(body.top_k, served.vocabulary),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        stop=tuple(body.stop),
        stop_token_ids=tuple(sorted(ends)),
        vocabulary=tokenizer.vocabulary,
        min_tokens=body.min_tokens,
        top_logprobs=body.top_logprobs_wanted or 0,
    )
