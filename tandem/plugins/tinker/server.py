"""The requests of the `tinker` SDK, answered: `tandem serve MODEL --train`.

    event loop                              model thread, one call after the other
    ----------                              --------------------------------------
    optim_step, ... ----- _start ---------> Models.optim_step, ...
    retrieve_future <---- the answer ------
                    (as long as HOLD_S, then the client asks again)

A request's id is its place (model and seq_id), so one that a client sends twice runs once. What is
not offered has no route, or fails with the SDK's error of category `user`.
"""

import asyncio
import json
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.model.config_file import check_model
from tandem.model.rope import positions_of
from tandem.runtime.errors import UserError, not_installed
from tandem.runtime.threads import CallThread
from tandem.serve.app import JsonResponse, Server, make_app, read_json
from tandem.serve.listen import address_errors, url_of
from tandem.serve.openai import ApiError

try:
    from google.protobuf.message import DecodeError
    from tinker import types
    from tinker.proto import tinker_public_pb2 as pb
except ImportError:
    raise not_installed("tinker", "tinker", where="tandem serve --train") from None

from tandem.api.session import Session
from tandem.plugins.tinker.models import Models, Sampler

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
HOLD_S = 20.0  # that a poll waits for an answer
KEEP_S = 600.0  # that an answer stays after a client has got it, which may not have reached it
LEFT_S = 600.0  # without a heartbeat: the models of the session make room for a new one
# One chunk after the other: gradients are added in an order that no network decides.
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}

Json = dict[str, Any]


class TinkerServer:
    """Sessions and futures of clients. models: called from one thread only; tokenizer: where
    clients load it from."""

    def __init__(self, models: Models, context: int, tokenizer: str):
        self._models, self._context, self._tokenizer = models, context, tokenizer
        self._thread = CallThread("models")
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._seen: dict[str, float] = {}  # sessions, and when they were heard of

    def routes(self) -> list[Route]:
        """Return the routes below /api/v1."""
        fixed: dict[str, Json] = {
            "client/config": CLIENT_CONFIG,
            "client/dynamic_config": {},
            "telemetry": {"status": "accepted"},
        }
        posts: dict[str, Callable[[bytes], Json]] = {
            **{path: partial(lambda answer, raw: answer, answer) for path, answer in fixed.items()},
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "load_weights": self.load_weights,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "weights_info": self.weights_info,
            "asample": self.sample,
        }
        return [
            *(
                Route(f"/api/v1/{p}", partial(_answer, f), methods=["POST"])
                for p, f in posts.items()
            ),
            Route("/api/v1/create_sampling_session", self.create_sampler, methods=["POST"]),
            Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"]),
            Route("/api/v1/sessions/{session}/finish", self.finish, methods=["POST"]),
            Route("/api/v1/samplers/{sampler}", self.get_sampler),
            Route("/api/v1/healthz", lambda request: JsonResponse({"status": "ok"})),
            Route("/api/v1/get_server_capabilities", self.capabilities),
        ]

    # ---- sessions

    async def capabilities(self, request: Request) -> Response:
        model = {"model_name": self._models.base_model, "max_context_length": self._context}
        return JsonResponse(
            {"supported_models": [{**model, "trainable": True, "sampleable": True}]}
        )

    def create_session(self, raw: bytes) -> Json:
        session = uuid.uuid4().hex
        self._seen[session] = time.monotonic()
        return {"session_id": session}

    def heartbeat(self, raw: bytes) -> Json:
        session = types.SessionHeartbeatRequest.model_validate_json(raw).session_id
        if session not in self._seen:
            raise ApiError(404, f"there is no session {session}: the server was started again")
        self._seen[session] = time.monotonic()
        return {}

    async def finish(self, request: Request) -> Response:
        self._seen.pop(request.path_params["session"], None)
        self._thread.run(self._leave)
        return JsonResponse(None)

    def _leave(self) -> None:
        """Drop the models of sessions that are not heard of, on the model thread."""
        now = time.monotonic()
        for ids in (self._models.models, self._models.samplers):
            for one in list(ids):
                if now - self._seen.get(one.partition(":")[0], 0.0) > LEFT_S:
                    del ids[one]

    # ---- futures

    def _start(self, request_id: str, function: Callable[..., Any], *arguments: Any) -> Json:
        """Have the model thread call a function, unless the request came before."""
        if request_id not in self._futures:
            self._futures[request_id] = self._thread.run(function, *arguments)
        return {"request_id": request_id}

    async def retrieve(self, request: Request) -> Response:
        """Answer with a future's result, its error, or the request to ask again."""
        asked = types.FutureRetrieveRequest.model_validate_json(await read_json(request))
        if (future := self._futures.get(asked.request_id)) is None:
            raise ApiError(404, f"there is no request {asked.request_id}")
        await asyncio.wait([future], timeout=HOLD_S)
        if not future.done():
            again = {"type": "try_again", "queue_state": "active"}
            return JsonResponse({**again, "request_id": asked.request_id}, 408)
        asyncio.get_running_loop().call_later(KEEP_S, self._futures.pop, asked.request_id, None)
        match future.exception():
            case None:
                result = future.result()
            case UserError() as error:
                return JsonResponse({"error": str(error), "category": "user"})
            case error:
                logger.error("request %s failed", asked.request_id, exc_info=error)
                return JsonResponse({"error": repr(error), "category": "server"})
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        return JsonResponse(result)

    # ---- models

    def create_model(self, raw: bytes) -> Json:
        request = types.CreateModelRequest.model_validate_json(raw)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        if request.optimizer_config.type != "adamw":
            raise ApiError(422, f"optimizer_config: {request.optimizer_config.type} is not offered")

        def create() -> Json:
            self._leave()
            self._models.create(model_id, request.base_model, request.lora_config)
            return {"type": "create_model", "model_id": model_id}

        return self._start(model_id, create)

    def load_weights(self, raw: bytes) -> Json:
        request = types.LoadWeightsRequest.model_validate_json(raw)
        model_id = request.model_id or f"{request.session_id}:train:{request.model_seq_id}"
        request_id = f"{model_id}:{request.seq_id or 0}"
        restore = self._models.restore
        return self._start(request_id, restore, model_id, request.path, request.optimizer)

    def get_info(self, raw: bytes) -> Json:
        model_id = types.GetInfoRequest.model_validate_json(raw).model_id
        info = self._models.model(model_id).info
        names = {"model_name": info.base_model, "tokenizer_id": self._tokenizer}
        rank = {"is_lora": info.rank > 0, "lora_rank": info.rank or None}
        return {"model_data": names, "model_id": model_id, "model_name": info.base_model, **rank}

    def forward_backward(self, raw: bytes) -> Json:
        request = pb.ForwardBackwardRequest.FromString(raw)
        request_id = f"{request.model_id}:{request.seq_id}"
        return self._start(request_id, self._models.forward_backward, request)

    def optim_step(self, raw: bytes) -> Json:
        request = types.OptimStepRequest.model_validate_json(raw)
        params = request.optim_params
        if not isinstance(params, types.AdamParams):
            raise ApiError(422, f"optim_params: {params.type} is not offered")
        request_id = f"{request.model_id}:{request.seq_id}"
        return self._start(request_id, self._models.optim_step, request.model_id, params)

    # ---- checkpoints

    def save_weights(self, raw: bytes) -> Json:
        request = types.SaveWeightsRequest.model_validate_json(raw)
        request_id = f"{request.model_id}:{request.seq_id}"
        name = request.path or str(request.seq_id)
        return self._start(request_id, self._models.save, request.model_id, name, request.overwrite)

    def save_for_sampler(self, raw: bytes) -> Json:
        request = types.SaveWeightsForSamplerRequest.model_validate_json(raw)
        request_id, model_id = f"{request.model_id}:{request.seq_id}", request.model_id
        if request.path is not None:
            return self._start(request_id, self._models.save_for_sampler, model_id, request.path)
        if request.kind != "snapshot":
            raise ApiError(422, f"kind: {request.kind} is not offered")
        sampler_id = f"{model_id}:sampler:{request.seq_id}"
        return self._start(request_id, self._models.sampler_of, sampler_id, model_id)

    def weights_info(self, raw: bytes) -> Json:
        path = types.ParsedCheckpointTinkerPath.from_tinker_path(json.loads(raw)["tinker_path"])
        kind = "weights" if path.checkpoint_type == "training" else "sampler"
        _, info = self._models.checkpoint(path.tinker_path, kind)
        rank = {"is_lora": info.rank > 0, "lora_rank": info.rank or None}
        return {"base_model": info.base_model, "train_unembed": False, **rank}

    # ---- sampling

    async def create_sampler(self, request: Request) -> Response:
        """Make a sampler of saved weights or of the base model; it is there with the answer."""
        asked = types.CreateSamplingSessionRequest.model_validate_json(await read_json(request))
        number = asked.sampling_session_seq_id
        sampler_id = f"{asked.session_id}:sampler:{number}"
        base_model, path = asked.base_model or self._models.base_model, asked.model_path
        opened = self._thread.run(self._models.open_sampler, sampler_id, base_model, number, path)
        with _refusals():
            await opened
        return JsonResponse({"sampling_session_id": sampler_id})

    async def get_sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler"]
        base_model, path = self._models.base_model, self._sampler(sampler_id).path
        return JsonResponse(
            {"sampler_id": sampler_id, "base_model": base_model, "model_path": path}
        )

    def _sampler(self, sampler_id: str | None) -> Sampler:
        if (sampler := self._models.samplers.get(sampler_id or "")) is None:
            raise ApiError(404, f"there is no sampler {sampler_id}; make a sampling client again")
        return sampler

    def sample(self, raw: bytes) -> Json:
        request = types.SampleRequest.model_validate_json(raw)
        sampler = self._sampler(request.sampling_session_id)
        request_id = f"{request.sampling_session_id}:{request.seq_id}"
        if request_id not in self._futures:
            sampler.asked.append((request_id, request))
        answer = self._start(request_id, self._models.sample, sampler, request_id)
        ids = [f"{request_id}:{number}" for number in range(request.num_samples)]
        return {**answer, "sample_sequence_ids": ids}


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise ApiError for a user's mistake and for a body that is none."""
    try:
        yield
    except UserError as error:
        raise ApiError(400, str(error)) from None
    except (ValueError, DecodeError) as error:  # pydantic's is a ValueError
        raise ApiError(422, f"the request cannot be read: {error}") from None


async def _answer(function: Callable[[bytes], Json], request: Request) -> Response:
    is_protobuf = request.headers.get("content-type") == PROTOBUF
    raw = await (request.body() if is_protobuf else read_json(request))
    with _refusals():
        return JsonResponse(function(raw))


def serve(options: Any, sock: socket.socket) -> None:
    """Serve until a signal. options: of cli/serve.py."""
    shape = check_model(options.model)
    session = partial(
        Session,
        options.model,
        **{
            "model.device": options.device,
            "model.dtype": options.dtype,
            "model.trust_remote_code": options.trust_remote_code,
            "data.chat_template": options.chat_template,
            "rollout.cache_mb": options.cache_mb,
            "rollout.max_batch": options.max_batch,
        },
    )
    models = Models(options.served_name or options.model, options.folder, session)
    folder = Path(options.model)
    tokenizer = str(folder.resolve()) if folder.is_dir() else options.model
    routes = TinkerServer(models, positions_of(shape), tokenizer).routes()
    server = Server(
        make_app(routes, token=options.api_key, open_paths=["/api/v1/healthz"]),
        ready=lambda: print(f"training {options.model} on {url_of(sock)}", flush=True),
    )
    with address_errors(options.host, options.port):  # another server may have been faster
        sock.listen()
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
        server.run(sockets=[sock])
