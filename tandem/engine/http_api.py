"""Completions of OpenAI-compatible servers, over HTTP: token ids in, token ids and log-probs out.

A text is never tokenized again: prompts are sent as token ids, and an answer without token ids is
refused. Tandem's own server (`tandem serve`) is also given the address of the draws, so its
completions have the bits of a local engine; others get a seed made of it. Knows no servers'
number and no schedule (http.py).
"""

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tandem.engine.ending import find_ending
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address
from tandem.types import Array, Completion, Request

Json = dict[str, Any]

ANSWER_BYTES = 1 << 28
BUSY, LOST = (408, 425, 429), (500, 502, 503, 504)


class ServerLost(Exception):
    """A server that cannot be reached, or that fails; another one may do the work."""


class ServerBusy(Exception):
    """A server that asks for a pause."""


@dataclass(eq=False, slots=True)
class Call:
    """One HTTP request, which another thread may abort."""

    url: str  # of the API, e.g. http://127.0.0.1:8000/v1
    key: str  # for its Authorization header; empty: none
    connect_s: float  # until there is a connection
    answer_s: float  # without a byte from the server then
    aborted: bool = False
    _connection: HTTPConnection | None = field(default=None, init=False)

    def send(self, path: str, body: Json | None = None) -> Json:
        """Send a body (POST), or none (GET); return the answer. Raises ServerLost, ServerBusy, and
        UserError if the server refuses."""
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            parts = urlsplit(self.url)
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            with closing(kind(parts.netloc, timeout=self.connect_s)) as connection:
                self._connection = connection
                connection.connect()
                connection.sock.settimeout(self.answer_s)
                if self.aborted:
                    raise ServerLost("aborted")
                connection.request(method, parts.path.removesuffix("/") + path, data, headers)
                response = connection.getresponse()
                status, found = response.status, response.read(ANSWER_BYTES)
        except (OSError, HTTPException, UnicodeError) as error:  # the last: of a host's name
            raise ServerLost(f"{type(error).__name__}: {error}") from None
        return self._read(status, found)

    def abort(self) -> None:
        """Close the connection; `send` raises ServerLost."""
        self.aborted = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def _read(self, status: int, found: bytes) -> Json:
        if status in BUSY:
            raise ServerBusy(f"HTTP {status}")
        if status in LOST:
            raise ServerLost(f"HTTP {status}: {found[:200].decode(errors='replace')}")
        if status != 200:
            raise UserError(
                "a rollout server refuses a request",
                where=self.url,
                found=f"HTTP {status}: {_message(found)}",
                expected="an answer",
                next="set TANDEM_API_KEY to its key" if status == 401 else "",
            )
        try:
            answer = json.loads(found)
        except ValueError as error:
            raise ServerLost(f"an answer that is no JSON: {error}") from None
        if not isinstance(answer, dict):
            raise ServerLost("an answer that is no JSON object")
        return answer


def _message(found: bytes) -> str:
    try:
        return str(json.loads(found)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return found[:200].decode(errors="replace")


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


def served_model(call: Callable[[str], Call], url: str) -> ServedModel:
    """Ask a server which model it serves. call: makes a Call to an address. Raises as Call.send."""
    try:
        model = dict(call(url).send("/models")["data"][0])
        name, longest = str(model["id"]), int(model.get("max_model_len") or 0)
        if model.get("owned_by") != "tandem":
            return ServedModel(name=name, is_tandem=False, longest=longest)
        weights = call(url.removesuffix("/v1")).send("/weights")
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


def load_weights(call: Call, path: str, version: int, sha256: str) -> None:
    """Have Tandem's server run the weights of a file. Raises UserError if its weights have another
    hash then, and as Call.send."""
    answer = call.send("/weights", {"path": path, "version": version})
    if (answer.get("weight_version"), answer.get("sha256")) != (version, sha256):
        raise UserError(
            "a server's weights differ from the trainer's",
            where=call.url,
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
        "max_tokens": _max_tokens(request),
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


def _max_tokens(request: Request) -> int:
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
        versions = {served.version, *map(int, choice.get("weight_versions") or [])}
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            "a server does not return token ids and log-probs",
            where=url,
            found=f"{type(error).__name__}: {error}",
            expected="choices[0].token_ids, and choices[0].logprobs.token_logprobs",
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
    if ending is None or sampled > _max_tokens(request):
        found = f"{sampled} tokens, the last of them {tokens[-1]}"
        raise _other_ending(request, f"{found}, finish_reason {choice.get('finish_reason')!r}", url)
    text, reason = ending
    return Completion(
        tokens=tokens, logprobs=logprobs, weight_versions=column, text=text, stop_reason=reason
    )


def _other_ending(request: Request, found: str, url: str) -> UserError:
    stop = f"one of the tokens {request.params.stop_token_ids}, a stop string"
    return UserError(
        "a server ended a completion where the run would not",
        where=url,
        found=found,
        expected=f"{stop}, or {_max_tokens(request)} tokens",
        next="serve the model of model.path, whose end of turn it knows, with its whole context",
    )


def api_key(environment: Mapping[str, str]) -> str:
    """Return the key of the servers, of TANDEM_API_KEY; empty if there is none."""
    return environment.get("TANDEM_API_KEY", "")


def _undefined(key: str, found: str, expected: str) -> UserError:
    return UserError(
        "a server does not define this setting as Tandem does",
        where=key,
        found=found,
        expected=expected,
        next="Tandem's own engine has it",
    )
