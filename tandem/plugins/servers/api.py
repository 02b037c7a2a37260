"""Completions of OpenAI-compatible servers, over HTTP: token ids in, token ids and log-probs out.

A text is never tokenized again: prompts are sent as token ids, and an answer without token ids is
refused. Tandem's own server (`tandem serve`) is also given the address of the draws, so its
completions have the bits of a local engine; others get a seed made of it. Knows no servers'
number and no schedule (engines.py).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from tandem.engine.ending import find_ending
from tandem.runtime.errors import UserError
from tandem.runtime.http import Json, ServerLost
from tandem.runtime.rng import address
from tandem.types import Array, Completion, Request

# Asks an address of a server for JSON, with a body or without. Raises ServerLost, ServerBusy, and
# UserError if the server refuses.
Ask = Callable[..., Awaitable[Json]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's answer to what it serves."""

    name: str
    is_tandem: bool
    longest: int  # tokens of a sequence; 0: it does not say
    version: int = 0  # of Tandem's weights
    sha256: str = ""  # of Tandem's weights
    takes_updates: bool = False  # Tandem's with --allow-weight-updates

    @property
    def weights(self) -> tuple[int, str]:
        return self.version, self.sha256


async def served_model(ask: Ask, url: str) -> ServedModel:
    """Ask a server which model it serves. Raises as `ask`."""
    try:
        model = dict((await ask(f"{url}/models"))["data"][0])
        name, longest = str(model["id"]), int(model.get("max_model_len") or 0)
        if model.get("owned_by") != "tandem":
            return ServedModel(name=name, is_tandem=False, longest=longest)
        weights = await ask(f"{url.removesuffix('/v1')}/weights")
        return ServedModel(
            name=name,
            is_tandem=True,
            longest=longest,
            version=int(weights["weight_version"]),
            sha256=str(weights["sha256"]),
            takes_updates=bool(weights.get("takes_updates")),
        )
    except (LookupError, TypeError, ValueError):
        raise ServerLost("GET /models or /weights does not describe a model") from None


async def load_weights(ask: Ask, url: str, path: str, version: int, sha256: str) -> None:
    """Have Tandem's server run the weights of a file. Raises UserError if its weights have another
    hash then, and as `ask`."""
    answer = await ask(f"{url}/weights", {"path": path, "version": version})
    if (answer.get("weight_version"), answer.get("sha256")) != (version, sha256):
        raise UserError(
            "a server's weights differ from the trainer's",
            where=url,
            found=f"version {answer.get('weight_version')}, hash {answer.get('sha256')}",
            expected=f"version {version}, hash {sha256}",
            next="serve the model of model.path, in the type of model.dtype",
        )


def check_request(request: Request, served: ServedModel) -> None:
    """Raise UserError, which names the setting, for what servers do not define as Tandem does."""
    params = request.params
    assert request.mask is None and not params.min_tokens and params.prompt_logprobs is None
    if params.top_logprobs:
        raise _undefined("top_logprobs", f"{params.top_logprobs}", "0")
    if request.resume_from is not None and params.stop:
        # the server would not see a stop string that begins before the pause
        raise _undefined("rollout.stop with rollout.token_budget", str(list(params.stop)), "none")
    if served.is_tandem:
        return
    if params.repetition_penalty != 1.0:
        raise _undefined("rollout.repetition_penalty", f"{params.repetition_penalty:g}", "1.0")
    if params.min_p and (params.top_k or params.top_p < 1.0):
        raise _undefined("rollout.min_p with rollout.top_k or top_p", f"{params.min_p:g}", "0.0")


def completion_body(request: Request, served: ServedModel) -> Json:
    """Return the body of POST /completions for a request; what it resumes counts as prompt."""
    params, paused = request.params, request.resume_from
    before = np.zeros(0, np.int64) if paused is None else paused.tokens
    start = request.num_sampled + len(before)
    body: Json = {
        "model": served.name,
        "prompt": np.concatenate([request.prompt, before]).tolist(),
        "max_tokens": max_tokens(request),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logprobs": 0,  # of the sampled tokens alone
        "return_token_ids": True,
    }
    extensions = {"top_k": params.top_k, "min_p": params.min_p}
    body |= {name: value for name, value in extensions.items() if value}
    if served.is_tandem:
        body |= {"repetition_penalty": params.repetition_penalty}
        return body | {"draw_key": request.key, "draw_start": start}
    return body | {"seed": address(request.key, start) >> 1}


def max_tokens(request: Request) -> int:
    """Return the most tokens that a request samples now."""
    paused = request.resume_from
    room = request.params.max_new_tokens - (0 if paused is None else len(paused.tokens))
    return min(room, request.max_tokens_now or room)


def read_completion(
    answer: Json,
    request: Request,
    served: ServedModel,
    weight_version: int,
    decode: Callable[[Array], str],
    url: str,
) -> Completion:
    """Read the completion of a request out of a server's answer. weight_version: of its new tokens;
    decode: token ids to text. Raises UserError if it lacks something or is of other weights."""
    try:
        [choice] = answer["choices"]
        tokens = np.array(choice["token_ids"], np.int64)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        if not tokens.shape == logprobs.shape == (len(tokens),) or not len(tokens):
            raise ValueError(f"{tokens.shape} token ids and {logprobs.shape} log-probs")
        if 0 < request.params.vocabulary <= tokens.max():
            raise ValueError(f"the id {tokens.max()}, which has no token")
        versions = {served.version, *map(int, choice.get("weight_versions") or [])}
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            "a server does not return token ids and log-probs",
            where=url,
            found=f"{type(error).__name__}: {error}",
            expected="choices[0].token_ids of the vocabulary, and logprobs.token_logprobs",
            next="tandem serve; or a vLLM that knows return_token_ids",
        ) from None
    if served.is_tandem and versions != {served.version}:
        raise UserError(
            "a server's weights changed while it generated",
            where=url,
            found=f"tokens of versions {sorted(versions)}",
            expected=f"version {served.version}",
            next="let no other run load weights into it",
        )
    column = np.full(len(tokens), weight_version, np.int32)
    sampled, pause_at = len(tokens), request.max_tokens_now
    if (paused := request.resume_from) is not None:
        pause_at = pause_at and pause_at + len(paused.tokens)
        tokens = np.concatenate([paused.tokens, tokens])
        logprobs = np.concatenate([paused.logprobs, logprobs])
        column = np.concatenate([paused.weight_versions, column])
    ending = find_ending(request.params, tokens.tolist(), pause_at, decode)
    if ending is None or sampled > max_tokens(request):
        ends = f"one of the tokens {request.params.stop_token_ids}, a stop string"
        raise UserError(
            "a server ended a completion where the run would not",
            where=url,
            found=f"{sampled} tokens, the last of them {tokens[-1]}, "
            f"finish_reason {choice.get('finish_reason')!r}",
            expected=f"{ends}, or {max_tokens(request)} tokens",
            next="serve the model of model.path, with its end of turn and its whole context",
        )
    text, reason = ending
    return Completion(
        tokens=tokens, logprobs=logprobs, weight_versions=column, text=text, stop_reason=reason
    )


def _undefined(key: str, found: str, expected: str) -> UserError:
    return UserError(
        "a server does not define this setting as Tandem does",
        where=key,
        found=found,
        expected=expected,
        next="Tandem's own engine has it",
    )
