"""An algorithm of your own over the exact engine: sample, forward_backward, optim_step, save.

    session = tandem.Session("runs/tiny", learning_rate=1e-4)
    [completions] = session.sample([[{"role": "user", "content": "1+1=?"}]], n=4)
    session.forward_backward([session.datum(c, advantage=1.0) for c in completions], "ppo_clip")
    session.optim_step()  # and the engine samples with the new weights

Engine and trainer are one model in this process, so the log-probs of `sample` are, to the last bit,
those that `forward_backward` starts from. All draws are addressed by the seed. The session sets
torch's threads and its switches for reproducible arithmetic, as every command does; keys of the
configuration are keywords (given.py). Knows no environment, no reward and no advantage.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.api.given import overrides_of, values_of
from tandem.config.recipe import load_config, to_toml
from tandem.data.renderer import load_renderer
from tandem.engine.engine import check_tokens
from tandem.jobs.engines import build_engine, prepare_process, probe_exactness
from tandem.jobs.models import build_learner, check_models
from tandem.model.forward import batch_logprobs
from tandem.model.rope import positions_of
from tandem.registry import names
from tandem.rl.algorithms import bound, policy_loss
from tandem.rl.losses import Metrics
from tandem.rl.user_functions import checked_losses
from tandem.rollout.score import sampling_params
from tandem.run_folder.checkpoint import Contents, load_checkpoint, save_checkpoint, versions
from tandem.run_folder.export import check_target, export, model_card
from tandem.run_folder.folder import resolved
from tandem.runtime.errors import UserError, require_range
from tandem.runtime.rng import address
from tandem.train_loop import load_learners, saved_tensors
from tandem.trainer.pack import join, pack, split
from tandem.trainer.ranks import Loss as RankLoss
from tandem.trainer.ranks import Totals
from tandem.types import Array, Completion, Message, Microbatch, Request, Sample

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Message] | Array  # a user's text, a chat, or tokens int64 [T]
# by the names of its parameters: policy_logprobs, proximal_logprobs, engine_logprobs, entropy,
# advantages, each float32 [N], sequences int64 [N], and settings -> losses of the tokens [N], or
# (losses, metrics as sums)
Loss = str | Callable[..., Tensor | tuple[Tensor, Mapping[str, float]]]
READ_KEYS = ("model", "rollout", "lora", "train", "run.seed", "run.threads", "data.chat_template")


@dataclass(frozen=True, kw_only=True)
class Datum:
    """A sequence to train on; arrays are aligned with its tokens [T].

    prefix: so many first tokens have no weight; neighbours with equal ones share their pass.
    """

    tokens: Array  # int64
    weights: Array  # float32, of the loss of each token; 0: it has none
    advantages: Array  # float32
    logprobs: Array  # float32, nats, that the tokens were sampled with
    prefix: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Completion):
    """A completion with its prompt, tokens int64 [T]."""

    prompt: Array


class Session:
    """A model, its engine and its optimizer in this process.

    model: a Hugging Face directory or hub name; keys: of the configuration, e.g. learning_rate,
    rank (LoRA), device, max_new_tokens. Raises UserError for a mistake in them.
    """

    def __init__(self, model: str | Path, **keys: Any):
        values = {"train.schedule": "constant"} | values_of("train", {"model": model, **keys})
        if unread := [k for k in values if not {k, k.partition(".")[0]} & {*READ_KEYS}]:
            raise UserError(f"a session reads no {unread[0]}", expected=", ".join(READ_KEYS))
        overrides = overrides_of(values, Path("runs/inputs"))
        self.config = resolved(load_config(None, overrides), Path(os.devnull), trial=False)
        prepare_process(self.config)
        check_models(self.config)
        path = self.config.model.path
        self.renderer = load_renderer(path, self.config.data.chat_template)
        self.params = sampling_params(self.config.rollout, self.renderer)
        self.learner = build_learner(self.config, path, self.config.train, steps=1)
        self.exact = not probe_exactness(self.config, self.learner.model, logger.info).parity
        self.engine = build_engine(self.config, self.learner.model, self.renderer)
        self.version, self._calls, self._folders = 0, 0, set[Path]()  # of its saves
        # of the last pass with a loss, by datum: log-probs of the tokens with a weight, float32 [N]
        self.trained_logprobs: list[Array] = []

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        place: tuple[int | str, ...] = (),
        uids: Sequence[str] = (),
        **params: Any,
    ) -> list[list[Sampled]]:
        """Return n completions of each prompt, by the newest weights.

        place, the prompt's row and its uid address the draws: with the same weights they give the
        same tokens. By default place is the number of this call. params: fields of
        types.SamplingParams in place of the configured ones; the trainer's log-probs are always
        those of the configured temperature and filters.
        """
        is_one = isinstance(prompts, str) or not hasattr(prompts, "__len__")
        is_one = is_one or any(isinstance(one, Mapping) for one in prompts)
        known = [one.name for one in fields(self.params)]
        if is_one or not isinstance(n, Integral) or n < 1 or len(uids) not in (0, len(prompts)):
            found = f"{prompts!r:.40}, n = {n!r}, {len(uids)} uids"
            expected = "a list of prompts, n of at least 1, and a uid of each prompt or none"
            raise UserError("nothing can be sampled", found=found, expected=expected)
        if unknown := params.keys() - {*known}:
            raise UserError(f"sample has no {min(unknown)!r}", expected=", ".join(known))
        stop = params.get("stop", self.params.stop)
        params["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        wanted = replace(self.params, **params)
        place, self._calls = place or ("sample", self._calls), self._calls + 1
        requests = []
        for row, prompt in enumerate(prompts):
            uid, tokens = uids[row] if uids else "", self.tokens(prompt)
            for number in range(n):
                key = address(self.config.run.seed, *place, row, uid, number)
                requests.append(Request(key=key, prompt=tokens, params=wanted))
        done = [
            Sampled(prompt=one.request.prompt, **{f: getattr(one.completion, f) for f in FIELDS})
            for one in self.engine.run(requests)
        ]
        return [done[first : first + n] for first in range(0, len(done), n)]

    def tokens(self, prompt: Prompt) -> Array:
        """Return the tokens int64 [T] of a prompt, with the header of the model's turn."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        is_list = isinstance(prompt, Sequence | np.ndarray) and len(prompt) > 0
        if is_list and isinstance(prompt[0], Mapping):
            return self.renderer.prompts([prompt], ())[0]  # type: ignore[list-item]
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            expected = "a text, a list of messages, or whole numbers, the tokens [T]"
            raise UserError("this is no prompt", found=f"{prompt!r:.60}", expected=expected)
        return tokens.astype(np.int64)

    def datum(self, completion: Sampled, *, advantage: float = 1.0, weight: float = 1.0) -> Datum:
        """Return the datum of a completion: its tokens carry that weight and advantage."""
        try:
            prompt, shape = completion.prompt, len(completion.tokens)
            given = [np.full(shape, value, np.float32) for value in (weight, advantage)]
        except (AttributeError, TypeError, ValueError) as error:
            expected = "a completion of `sample`, and numbers"
            raise UserError("this makes no datum", found=f"{error}", expected=expected) from None
        zeros, tokens = np.zeros(len(prompt)), np.concatenate([prompt, completion.tokens])
        pairs = zip(ARRAYS, (*given, completion.logprobs), strict=True)
        arrays: Any = {name: np.concatenate([zeros, own], dtype=np.float32) for name, own in pairs}
        return Datum(tokens=tokens, prefix=len(prompt), **arrays)

    def logprobs(self, data: Sequence[Datum]) -> list[Array]:
        """Return the log-probs, float32 [N], nats, of each datum's tokens with a weight, by the
        trainer's pass."""
        (batches, _), model = self._pack(data), self.learner.model
        with torch.no_grad():
            found = [batch_logprobs(model, batch, self.params)[0] for batch in batches]
        return _by_datum(batches, found)

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss = "cross_entropy", **settings: Any
    ) -> dict[str, float]:
        """Add the gradient of sum(weight x loss) over the tokens of all data; return metrics, as
        sums over tokens.

        loss: cross_entropy, importance_sampling, a name that rl.loss takes, or a function.
        settings: of the loss, e.g. clip_low. Raises UserError if the loss is not finite. After an
        error all gradients are forgotten.
        """
        batches, found, total = self._loss_of(data, loss, settings)
        totals = None
        try:
            totals = self.learner.ranks.backward(self.learner.model, batches, total)
        finally:
            if totals is None or not totals.finite:
                self.learner.optimizer.update(skip=True)
        if not totals.finite:
            raise UserError("the loss is not finite", where="forward_backward", found=f"{loss}")
        self.trained_logprobs = _by_datum(batches, found)
        return {**totals.metrics, "tokens": float(totals.num_loss_tokens)}

    def forward(
        self, data: Sequence[Datum], loss: Loss = "cross_entropy", **settings: Any
    ) -> dict[str, float]:
        """Return the metrics of `forward_backward`, without a gradient."""
        batches, found, total = self._loss_of(data, loss, settings)
        totals = Totals()
        with torch.no_grad():
            for batch in batches:
                totals.add(len(batch.targets), True, total(batch)[1])
        self.trained_logprobs = _by_datum(batches, found)
        return {**totals.metrics, "tokens": float(totals.num_loss_tokens)}

    def _loss_of(
        self, data: Sequence[Datum], loss: Loss, settings: Mapping[str, Any]
    ) -> tuple[list[Microbatch], list[Tensor], RankLoss]:
        """Return microbatches, and the function of one's loss and metrics, which appends its
        log-probs to the list."""
        (batches, data), found = self._pack(data), list[Tensor]()
        function = _function(loss, settings)
        arrays = {name: [getattr(one, name)[one.weights != 0] for one in data] for name in ARRAYS}

        def total(batch: Microbatch) -> tuple[Tensor, Metrics]:
            own = {name: torch.from_numpy(join([batch], of)[0]) for name, of in arrays.items()}
            logprobs, entropy = batch_logprobs(self.learner.model, batch, self.params)
            found.append(logprobs.detach())
            sequences, sampled = torch.from_numpy(batch.sequences), own["logprobs"]
            offered = logprobs, sampled, sampled, own["advantages"], sequences, entropy
            result = function(dict(zip(OFFERED, offered, strict=True)))
            name = getattr(loss, "__name__", f"{loss}")
            terms, metrics = checked_losses("the loss", name, result, logprobs)
            value = (terms * own["weights"]).sum()
            return value, {**metrics, "loss": float(value.detach())}

        return batches, found, total

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Step the weights by the gradients added so far, and have the engine run the new ones;
        return grad_norm, learning_rate and skipped_updates. learning_rate: from now on."""
        optimizer = self.learner.optimizer
        if learning_rate is not None:
            settings = replace(optimizer.settings, learning_rate=learning_rate)
            require_range(settings, {"learning_rate": (0, np.inf)})
            optimizer.settings = settings
        metrics = optimizer.update()
        self.version += 1
        self.engine.apply(self.version)
        return metrics

    def save(self, folder: str | Path) -> Path:
        """Write weights, moments and the place of the draws to `folder/step_N`; return it. Raises
        UserError if another session's are there."""
        folder = Path(folder).absolute()
        if folder not in self._folders and any(folder.glob("step_*")):
            next = "another folder, or session.load, to go on from a save"
            raise UserError("another session's saves are there", where=str(folder), next=next)
        optimizer = self.learner.optimizer
        state = {
            "calls": self._calls,
            "optimizer_steps": {"policy": optimizer.step},
            "learning_rate": optimizer.settings.learning_rate,
        }
        contents = Contents(
            step=self.version,
            tensors=saved_tensors({"policy": self.learner}),
            state=state,
            config=to_toml(self.config),
            keep=1 << 30,
        )
        self._folders.add(folder)
        return save_checkpoint(folder, contents)

    def load(self, path: str | Path, *, optimizer: bool = True) -> None:
        """Go back to what `save` wrote to that path; gradients are forgotten. optimizer: moments
        and learning rate, too, else this session's stay. Raises UserError for a damaged one."""
        if saves := sorted(Path(path).glob("step_*")):
            raise UserError("a folder of saves", where=str(path), next=f"load {saves[-1]}")
        tensors, state = load_checkpoint(Path(path))
        if "calls" not in state:
            next = "tandem export RUN, and a Session of the exported folder"
            raise UserError("a checkpoint of a run, not of a session", where=str(path), next=next)
        self.learner.optimizer.update(skip=True)
        old = self.learner.optimizer
        if optimizer:  # a new one has no moments, as a save before the first step
            settings = replace(old.settings, learning_rate=state["learning_rate"])
            fresh = type(old)(old.parameters, settings, whole=old.whole)
            self.learner = replace(self.learner, optimizer=fresh)
            load_learners({"policy": self.learner}, tensors, state["optimizer_steps"])
        else:
            self.learner.load(tensors["policy"], self.learner.saved()[1], old.step)
        self._calls = state["calls"]
        self._folders.add(Path(path).absolute().parent)
        self.version = int(Path(path).name.rpartition("_")[2])
        self.engine.apply(self.version)

    def export(self, folder: str | Path) -> Path:
        """Write the model as a Hugging Face directory, in place of an older export; return it.
        Raises UserError if the folder holds anything else."""
        check_target(Path(folder))
        about: dict[str, Any] = {"command": "session", "metrics": {"step": self.version}}
        about |= {"inputs": {}, "versions": versions()}
        card = model_card(self.learner.model, self.config, **about)
        return export(self.learner.model, self.config.model.path, Path(folder), card)

    def _pack(self, data: Sequence[Datum]) -> tuple[list[Microbatch], list[Datum]]:
        """Return microbatches, and data with arrays of their types. Raises UserError for a datum
        that cannot be trained."""
        config, done, samples = self.learner.model.config, list[Datum](), list[Sample]()
        groups: dict[bytes, int] = {}  # by prefix: what shares a pass has equal tokens
        most = positions_of(config) + 1  # the last token is not read
        for number, one in enumerate([data] if isinstance(data, Datum) else data):
            where = f"data[{number}]"
            if not isinstance(one, Datum):
                raise UserError("this is no Datum", where=where, found=f"{one!r:.60}")
            tokens, start = check_tokens(one.tokens, config, where), max(one.prefix, 1)
            arrays: Any = {name: np.asarray(getattr(one, name), np.float32) for name in ARRAYS}
            mask = arrays["weights"] != 0
            unlike = {k: of.shape for k, of in arrays.items() if of.shape != tokens.shape}
            if unlike or not start < len(tokens) <= most or mask[:start].any():
                found = f"{len(tokens)} tokens, prefix {one.prefix} {unlike or ''}"
                expected = f"2 to {most} tokens, {', '.join(ARRAYS)} of each, no weight before the "
                expected += "second, nor in the prefix"
                raise UserError("a bad datum", where=where, found=found, expected=expected)
            if not np.isfinite([arrays[name][mask] for name in ("weights", "advantages")]).all():
                raise UserError("a weight or an advantage is not finite", where=where)
            group = groups.setdefault(tokens[: one.prefix].tobytes(), len(groups))
            samples.append(Sample(tokens=tokens, loss_mask=mask, prefix=one.prefix, group=group))
            done.append(replace(one, tokens=tokens, **arrays))
        return list(pack(samples, self.config.train.tokens_per_microbatch)), done


def _by_datum(batches: Sequence[Microbatch], found: Sequence[Tensor]) -> list[Array]:
    by_datum = split(batches, [logprobs.cpu().numpy() for logprobs in found])
    return [by_datum[number] for number in range(len(by_datum))]


FIELDS = tuple(Completion.__dataclass_fields__)
ARRAYS = ("weights", "advantages", "logprobs")  # of a Datum
# to a loss, by the names of its parameters
OFFERED = (
    *("policy_logprobs", "proximal_logprobs", "engine_logprobs", "advantages"),
    *("sequences", "entropy"),
)


def _function(loss: Loss, settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return what computes a loss, with its settings, of those of its parameters that are
    offered."""
    known = [*OWN, *names("losses")]
    if not callable(loss) and loss not in known:
        expected = f"one of {', '.join(known)}, or a function"
        raise UserError("there is no such loss", found=repr(loss), expected=expected)
    function = OWN.get(loss) if isinstance(loss, str) else loss
    bind = (lambda **offered: bound(function, offered)) if function else policy_loss(loss).bind
    if unknown := settings.keys() - (bind(**settings).keywords.keys() - {*OFFERED}):
        raise UserError(f"the loss {loss} has no setting {min(unknown)!r}")
    settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, **settings}
    return lambda offered: bind(**settings, **offered)()


def cross_entropy(policy_logprobs: Tensor) -> tuple[Tensor, Mapping[str, float]]:
    """Compute -log p."""
    return -policy_logprobs, {}


def importance_sampling(
    policy_logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Mapping[str, float]]:
    """Compute -r A, r = policy / sampled, without a clip."""
    return -(policy_logprobs - engine_logprobs).exp() * advantages, {}


OWN: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}
