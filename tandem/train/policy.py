"""The policy: log-probs of packed microbatches, and updates over them. Knows no environment and no engine.

The engine runs this model's own tensors, so `engine_logprobs` are the behaviour policy's and no second forward pass
is made for them; with `importance_cap` one is, for an engine that is not exact.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.config import RL
from tandem.model.load import ExactModel
from tandem.model.logprobs import Filter, Seen, token_logprobs
from tandem.rl.kl import kl_estimate
from tandem.rl.losses import Metrics, negative_log_likelihood, ppo_clip, total, truncated_importance
from tandem.train.optimizer import Optimizer
from tandem.types import Microbatch


def batch_logprobs(model: ExactModel, batch: Microbatch, how: Filter) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) float32 [N] of the batch's targets under the model."""
    plan = model.packed_plan(batch.segments)
    hidden = model.hidden(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), plan)
    picked = hidden.index_select(0, torch.from_numpy(batch.rows).to(model.device))
    head, targets = model.head, torch.from_numpy(batch.targets).to(model.device)
    seen = None if how.repetition_penalty == 1.0 else partial(_seen, batch, model.device)
    return token_logprobs(picked, head.weight, head.pack.of(head.weight), targets, how, seen)


def _seen(batch: Microbatch, device: torch.device, start: int, stop: int) -> Seen:
    """The distinct tokens before targets start .. stop - 1: their segment's up to the row that predicts, and its prefix's."""
    first, _, prefix_first, prefix = batch.segments.T
    rows = batch.rows[start:stop]
    owner = np.searchsorted(first, rows, side="right") - 1  # segments are in the order of their rows
    tokens = [
        np.union1d(batch.tokens[prefix_first[s] : prefix_first[s] + prefix[s]], batch.tokens[first[s] : row + 1])
        for s, row in zip(owner, rows, strict=True)
    ]
    index = np.arange(len(tokens)).repeat([len(t) for t in tokens])
    return Seen(torch.from_numpy(index).to(device), torch.from_numpy(np.concatenate(tokens)).to(device))


class Policy:
    """A model with its optimizer and, for the KL term, a frozen reference."""

    def __init__(self, model: ExactModel, optimizer: Optimizer, reference: ExactModel | None = None):
        self.model, self.optimizer, self.reference = model, optimizer, reference

    def learn(
        self, batches: Sequence[Microbatch], rl: RL, how: Filter, denominator: float, proximal: Sequence[Tensor] | None = None
    ) -> Metrics:  # fmt: skip
        """One optimizer step of the clipped policy loss.

        proximal: log-probs of each batch under the policy before the step's first update, when the engine's are
        not to be trusted to be that (`importance_cap`).
        """
        gaps = []

        def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
            policy, entropy = batch_logprobs(self.model, batch, how)
            engine = torch.from_numpy(batch.engine_logprobs)
            gaps.append(float((policy.detach() - engine).abs().max()))
            value, metrics = ppo_clip(
                policy, engine if proximal is None else proximal[index], torch.from_numpy(batch.advantages),
                denominator=denominator, clip_low=rl.clip_low, clip_high=rl.clip_high,
                weights=None if proximal is None else truncated_importance(proximal[index], engine, rl.importance_cap),
            )  # fmt: skip
            metrics["entropy"] = total(entropy)
            if self.reference is None:
                return value, metrics
            kl = kl_estimate(rl.kl_estimator, policy, self._reference_logprobs(batch, how))
            return value + rl.kl_coef * kl.sum() / denominator, {**metrics, "reference_kl": total(kl)}

        metrics = self._update(batches, loss)
        return {**metrics, "logprob_gap": float(np.max(gaps))}  # np: a NaN must show

    def fit(self, batches: Sequence[Microbatch]) -> Metrics:
        """One optimizer step of supervised fine-tuning, token mean over all batches."""
        denominator = float(sum(len(b.targets) for b in batches))

        def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
            return negative_log_likelihood(batch_logprobs(self.model, batch, Filter())[0], denominator=denominator)

        return self._update(batches, loss)

    def proximal_logprobs(self, batches: Sequence[Microbatch], how: Filter) -> list[Tensor]:
        with torch.no_grad():
            return [batch_logprobs(self.model, batch, how)[0] for batch in batches]

    @torch.no_grad()
    def _reference_logprobs(self, batch: Microbatch, how: Filter) -> Tensor:
        assert self.reference is not None
        return batch_logprobs(self.reference, batch, how)[0]

    def _update(
        self, batches: Sequence[Microbatch], loss: Callable[[int, Microbatch], tuple[Tensor, Metrics]]
    ) -> Metrics:
        """Accumulate the gradient over the batches, step; metrics are means over the loss tokens."""
        sums: Metrics = {}
        for index, batch in enumerate(batches):
            value, metrics = loss(index, batch)
            value.backward()  # type: ignore[no-untyped-call]
            for name, part in metrics.items():
                sums[name] = sums.get(name, 0.0) + part
        tokens = sum(len(b.targets) for b in batches)
        return {
            **{name: part / tokens for name, part in sums.items()},
            "num_loss_tokens": tokens,
            **self.optimizer.update(),
        }
