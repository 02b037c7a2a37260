"""The models of the server's clients, and what is done with them, one call after the other.

    create / restore -> forward_backward, optim_step -> save
                     -> sampler -> ask and sample

Each model is a Session with a copy of the base weights. A sampler keeps the trained weights of its
time, and its model's engine runs them while it samples, unless they still are the newest. All but
`ask` is called from one thread. Knows no HTTP.
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from tinker import types
from torch import Tensor

from tandem.api.session import Session
from tandem.model.rope import positions_of
from tandem.plugins.tinker.losses import loss_named, sampled
from tandem.plugins.tinker.wire import forward_output, read_datum, sample_output
from tandem.runtime.errors import UserError, require_range
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams

ALPHA = 32.0  # of Tinker's adapters (LoRA without regret)
ADAM = dict.fromkeys(("learning_rate", "eps", "weight_decay", "grad_clip_norm"), (0, np.inf))
ADAM |= dict.fromkeys(("beta1", "beta2"), (0, 1 - 1e-9))
ROOMS = {"weights": "weights", "sampler": "sampler_weights"}  # of checkpoints in tinker:// paths
PATH = re.compile(
    r"tinker://(?P<model>[\w:.-]+)/(?P<room>weights|sampler_weights)/(?P<name>[\w.-]+)"
)


@dataclass(frozen=True, kw_only=True)
class Info:
    """Origin of a model's weights. rank: of the adapter, 0: all weights are trained; samplers: made
    so far, the address of draws."""

    base_model: str
    rank: int
    seed: int
    samplers: int = 0


@dataclass
class Model:
    info: Info
    session: Session


@dataclass
class Sampler:
    """Weights of a model at a version, by name. place: the address of its draws; path: of the
    weights, for clients; asked: a queue of requests by their ids, for any thread."""

    model: Model
    version: int
    weights: Mapping[str, Tensor]
    place: tuple[int | str, ...]
    path: str | None = None
    asked: deque[tuple[str, types.SampleRequest]] = field(default_factory=deque)


class Models:
    """Models by their ids, samplers by theirs. session: makes one, given its keys."""

    def __init__(self, base_model: str, folder: Path, session: partial[Session]):
        self.base_model, self.folder, self._session = base_model, folder.absolute(), session
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._hosts: dict[int, Model] = {}  # by rank: of samplers without a model of their own
        self._sampled: dict[str, bytes | Exception] = {}

    # ---- models

    def create(self, model_id: str, base_model: str, lora: types.LoraConfig | None) -> None:
        """Make a model with a new adapter, or all of whose weights are trained."""
        if lora is not None and not (lora.train_mlp and lora.train_attn):
            raise UserError(
                "an adapter is of all linears of the layers",
                where="lora_config",
                expected="train_mlp and train_attn true",
            )
        require_range(lora or types.LoraConfig(rank=1), {"rank": (1, np.inf)})
        rank, seed = (lora.rank, lora.seed or 0) if lora is not None else (0, 0)
        self.models[model_id] = self._make(Info(base_model=base_model, rank=rank, seed=seed))

    def _make(self, info: Info) -> Model:
        if info.base_model != self.base_model:
            raise UserError(
                "the server has another model",
                where="base_model",
                found=info.base_model,
                expected=self.base_model,
            )
        adapter = {"rank": info.rank, "alpha": ALPHA} if info.rank else {}
        return Model(info, self._session(lora=adapter, seed=info.seed))

    def restore(self, model_id: str, path: str, optimizer: bool) -> dict[str, Any]:
        """Make a model, or make it anew, from what `save` wrote."""
        folder, info = self.checkpoint(path, "weights")
        model = self._make(info)
        [step] = folder.glob("step_*")
        model.session.load(step, optimizer=optimizer)
        self.models[model_id] = model
        return {"type": "load_weights", "path": path, "model_id": model_id}

    def model(self, model_id: str) -> Model:
        """Return a model. Raises UserError if there is none of that id."""
        if (model := self.models.get(model_id)) is None:
            raise UserError(
                "the server has no such model, as after it was started again",
                where="model_id",
                found=model_id,
                next="create_training_client_from_state_with_optimizer",
            )
        return model

    # ---- training

    def forward_backward(self, request: Any) -> bytes:
        """Answer a ForwardBackwardRequest in protobuf."""
        session = self.model(request.model_id).session
        config = {
            name: value.number if value.HasField("number") else value.text
            for name, value in request.loss_fn_config_v2.items()
        }
        loss, settings = loss_named(request.loss_fn, config)
        read = [read_datum(message, loss) for message in request.data]
        data, masks = [datum for datum, _ in read], [mask for _, mask in read]
        run = session.forward if request.forward_only else session.forward_backward
        metrics = run(data, loss.function, **settings)
        tokens = sum(float(sampled(one.logprobs, one.advantages).sum()) for one in data)
        named = {f"{k}:sum": value for k, value in {**metrics, "tokens": tokens}.items()}
        return forward_output(session.trained_logprobs, masks, named)

    def optim_step(self, model_id: str, params: types.AdamParams) -> dict[str, Any]:
        """Step a model's weights; grad_clip_norm 0 clips none."""
        session = self.model(model_id).session
        optimizer = session.learner.optimizer
        require_range(params, ADAM)
        clip = params.grad_clip_norm or float("inf")
        optimizer.settings = replace(optimizer.settings, max_grad_norm=clip)
        for group in optimizer.adam.param_groups:
            group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            group["weight_decay"] = params.weight_decay
        return {"metrics": session.optim_step(params.learning_rate)}

    # ---- checkpoints

    def save(self, model_id: str, name: str, overwrite: bool) -> dict[str, Any]:
        """Write weights and moments of a model; return their path."""
        model = self.model(model_id)
        path, folder = self._new(model_id, "weights", name, overwrite)
        model.session.save(folder)
        (folder / "info.json").write_text(json.dumps(asdict(model.info)))
        return {"type": "save_weights", "path": path}

    def save_for_sampler(self, model_id: str, name: str) -> dict[str, Any]:
        """Write the trained weights of a model; return their path."""
        model = self.model(model_id)
        path, folder = self._new(model_id, "sampler", name, overwrite=True)
        folder.mkdir(parents=True)
        save_file(_trained(model), folder / "weights.safetensors")
        (folder / "info.json").write_text(json.dumps(asdict(model.info)))
        return {"type": "save_weights_for_sampler", "path": path}

    def _new(self, model_id: str, kind: str, name: str, overwrite: bool) -> tuple[str, Path]:
        """Return the path of a new checkpoint, and its folder, which is not there."""
        path = f"tinker://{model_id}/{ROOMS[kind]}/{name}"
        folder = self._folder(path, kind)
        if folder.exists() and not overwrite:
            raise UserError("the checkpoint exists", where=path, next="overwrite=True, or a name")
        shutil.rmtree(folder, ignore_errors=True)
        return path, folder

    def _folder(self, path: str, kind: str) -> Path:
        found = PATH.fullmatch(path)
        if found is None or found["room"] != ROOMS[kind] or set(found["name"]) <= {"."}:
            raise UserError(
                "this is no path of such a checkpoint",
                where=path,
                expected=f"tinker://MODEL/{ROOMS[kind]}/NAME, NAME of letters, digits and .-_",
            )
        return self.folder / found["model"] / found["room"] / found["name"]

    def checkpoint(self, path: str, kind: str) -> tuple[Path, Info]:
        """Return the folder of a checkpoint and what it is of. Raises UserError if there is
        none."""
        folder = self._folder(path, kind)
        try:
            return folder, Info(**json.loads((folder / "info.json").read_text()))
        except FileNotFoundError:
            raise UserError("there is no such checkpoint", where=path) from None

    # ---- sampling

    def sampler_of(self, sampler_id: str, model_id: str) -> dict[str, Any]:
        """Make a sampler of a model's weights of now; return its id."""
        model = self.model(model_id)
        number = model.info.samplers
        model.info = replace(model.info, samplers=number + 1)
        self.samplers[sampler_id] = Sampler(
            model=model,
            version=model.session.version,
            weights=_trained(model),
            place=("sampler", number),
        )
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    def open_sampler(self, sampler_id: str, base_model: str, number: int, path: str | None) -> None:
        """Make a sampler of saved weights, or of the base model."""
        weights, info = {}, Info(base_model=base_model, rank=0, seed=0)
        if path is not None:
            folder, info = self.checkpoint(path, "sampler")
            weights = load_file(folder / "weights.safetensors")
        if info.rank not in self._hosts:
            self._hosts[info.rank] = self._make(info)
        self.samplers[sampler_id] = Sampler(
            model=self._hosts[info.rank],
            version=-1 if weights else 0,
            weights=weights,
            place=(path or "base", number),
            path=path,
        )

    def sample(self, sampler: Sampler, request_id: str) -> bytes:
        """Answer a request that was put in the sampler's queue, and with it all that wait there."""
        if request_id not in self._sampled:
            session = sampler.model.session
            load, newest = session.learner.model.load_weights, _trained(sampler.model)
            is_stale = sampler.version != session.version
            if is_stale:
                session.engine.apply(session.version, partial(load, sampler.weights))
            self._run(sampler, session)
            if is_stale:
                session.engine.apply(session.version, partial(load, newest))
        answer = self._sampled.pop(request_id)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self, sampler: Sampler, session: Session) -> None:
        asked, requests = [], list[Request]()
        while sampler.asked:
            request_id, request = sampler.asked.popleft()
            try:
                own = requests_of(sampler, session, request)
                session.engine.check(own[0])
            except Exception as error:  # one client's mistake is no other's
                self._sampled[request_id] = error
            else:
                asked.append((request_id, request))
                requests += own
        try:
            ran = iter(session.engine.run(requests))
        except Exception as error:
            self._sampled |= dict.fromkeys((request_id for request_id, _ in asked), error)
            return
        for request_id, request in asked:
            tickets = list(islice(ran, request.num_samples))
            done = [one.completion for one in tickets if one.completion is not None]
            length = request.prompt.length
            first = length - (request.prompt_logprobs_last_n or length - 1)
            self._sampled[request_id] = sample_output(done, tickets[0].prompt_scores, first)


def _trained(model: Model) -> dict[str, Tensor]:
    """Copy the weights that a model trains."""
    parameters = model.session.learner.optimizer.parameters
    return {name: weight.detach().clone() for name, weight in parameters.items()}


def requests_of(sampler: Sampler, session: Session, request: types.SampleRequest) -> list[Request]:
    """Return the engine's requests, one a sample. Raises UserError for what is not offered."""
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise UserError("images and audio are not offered", where="prompt")
    refused = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
    if asked := [name for name in refused if getattr(request, name)]:
        raise UserError("this is not offered", where=", ".join(asked))
    prompt = np.array(request.prompt.to_ints(), np.int32).astype(np.int64)  # no id of an image
    given = request.sampling_params
    room = max(positions_of(session.learner.model.config) - len(prompt), 1)
    last = {"prompt_logprobs_last_n": (1, max(len(prompt) - 1, 1))}
    require_range(request, {"num_samples": (1, 1 << 16), **last})
    stops = [given.stop] if isinstance(given.stop, str) else given.stop
    params = SamplingParams(
        temperature=given.temperature,
        top_k=0 if given.top_k == -1 else given.top_k,
        top_p=given.top_p,
        max_new_tokens=room if given.max_tokens is None else given.max_tokens,
        stop=tuple(stop for stop in stops or () if isinstance(stop, str)),
        stop_token_ids=session.params.stop_token_ids
        if stops is None
        else tuple(stop for stop in stops if isinstance(stop, int)),
        top_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.topk_prompt_logprobs if request.prompt_logprobs else None,
    )
    place = sampler.place if given.seed is None else ("seed", given.seed)
    of_request = request.seq_id or 0 if given.seed is None else 0
    keys = [
        address(session.config.run.seed, *place, of_request, number)
        for number in range(request.num_samples)
    ]
    return [Request(key=key, prompt=prompt, params=params) for key in keys]
