"""`.venv/bin/python benchmarks/bias.py`: bias and noise of each off-policy correction against
staleness, enumerated.

Writes results/bias.md. The episodes are of a toy policy some gradient steps ago
(tests/support/toy.py); the mean and the standard deviation are over *all* groups of two episodes,
so the table has no sampling error. The estimates come out of tandem.rl.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from tandem.rl.advantages import rloo  # noqa: E402
from tandem.rl.corrections import Correction, correction, sequence_errors  # noqa: E402
from tandem.rl.losses import ppo_clip, reinforce  # noqa: E402
from tandem.runtime import numerics  # noqa: E402
from tests.support import toy  # noqa: E402

GROUP = 2
STEPS = (0, 1, 2, 4, 8)
STEP_LENGTH = 0.15
TOKENS, HORIZON = 3, 4
WORLDS = [
    (policy, seed) for policy in (toy.table_policy, toy.two_layer_policy) for seed in range(10)
]
# config.py's defaults; max_logprob_error is off there
LOW, CAP, CLIP, MAX_ERROR = 0.5, 2.0, 0.2, 1.5
HUGE = 1e9

# log-probs of the policy (differentiable), of the engine, advantages, sequences, all [N] -> losses
# [N]
Losses = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Both relative to the length of the gradient."""

    bias: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one world: KL(behaviour || policy) in nats at each staleness, and the entries
    of every row."""

    kls: list[float]
    rows: dict[str, list[Entry]]


def clipped_around_engine(
    policy: Tensor, engine: Tensor, advantages: Tensor, sequences: Tensor
) -> Tensor:
    return ppo_clip(policy, engine, advantages, clip_low=CLIP, clip_high=CLIP)[0]


def corrected(
    policy: Tensor,
    engine: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    kind: Correction,
    cap: float = CAP,
) -> Tensor:
    """The first update of a step: the proximal policy is the policy itself."""
    proximal = policy.detach()
    weights = correction(kind, proximal, engine, sequences, low=LOW, cap=cap)
    return weights * ppo_clip(policy, proximal, advantages, clip_low=CLIP, clip_high=CLIP)[0]


def without_far_sequences(
    policy: Tensor, engine: Tensor, advantages: Tensor, sequences: Tensor
) -> Tensor:
    keep = sequence_errors(policy.detach(), engine, sequences)[sequences] <= MAX_ERROR
    return keep * reinforce(policy, advantages)[0]


NOTHING = "none, `reinforce`"
ROWS: dict[str, Losses] = {
    NOTHING: lambda policy, engine, advantages, sequences: reinforce(policy, advantages)[0],
    "none, `ppo_clip` around the engine's": clipped_around_engine,
    "`decoupled`": partial(corrected, kind="decoupled"),
    "`tis`": partial(corrected, kind="tis"),
    "`icepop`": partial(corrected, kind="icepop"),
    "`max_logprob_error`, `reinforce`": without_far_sequences,
    "`mis`": partial(corrected, kind="mis"),
    "`tis_sequence`": partial(corrected, kind="tis_sequence"),
    "`tis_sequence` without a cap": partial(corrected, kind="tis_sequence", cap=HUGE),
}


def main() -> int:
    numerics.prepare(threads=1)  # tensors are tiny: a second thread only waits
    (ROOT / "results" / "bias.md").write_text(document(measure_all()))
    return 0


def measure_all() -> list[Measured]:
    return [measure(*trained(policy, seed)) for policy, seed in WORLDS]


def trained(policy: toy.Policy, seed: int) -> tuple[toy.World, list[Tensor]]:
    """A world whose policy has made steps along its exact gradient, and its parameters before the
    last STEPS of them."""
    here = toy.world(toy.process(TOKENS, HORIZON), policy, binary=False, seed=seed)
    path = [here.parameters]
    for _ in range(max(STEPS)):
        gradient = here.gradient(toy.expected_reward(here))
        here = replace(here, parameters=here.parameters + STEP_LENGTH * gradient / gradient.norm())
        path.append(here.parameters)
    return here, [path[-1 - steps] for steps in STEPS]


def measure(world: toy.World, behaviours: list[Tensor]) -> Measured:
    batch = toy.all_groups(world, GROUP)
    gradient = world.gradient(toy.expected_reward(world))
    kls = [float(toy.reverse_kl(world, world.table())(behaviour)) for behaviour in behaviours]
    rows = {
        name: [entry(world, batch, losses, behaviour, gradient) for behaviour in behaviours]
        for name, losses in ROWS.items()
    }
    return Measured(kls=kls, rows=rows)


def entry(
    world: toy.World, batch: toy.Batch, losses: Losses, behaviour: Tensor, gradient: Tensor
) -> Entry:
    engine = world.logprobs(behaviour)[batch.rows]
    advantages = batch.per_token(rloo(world.rewards[batch.picks].numpy()))
    moves = toy.estimates(
        world,
        batch,
        lambda policy: losses(policy, engine, advantages, batch.episodes) / GROUP,
        torch.ones_like(engine),
    )
    mean = toy.expectation(world, batch, moves, behaviour)
    variance = toy.expectation(
        world, batch, (moves - mean).square().sum(1, keepdim=True), behaviour
    )
    size = gradient.norm()
    return Entry(bias=float((mean - gradient).norm() / size), noise=float(variance.sqrt() / size))


def medians(measured: list[Measured], name: str) -> list[Entry]:
    """One row's medians over the worlds, at each staleness."""
    columns = zip(*(m.rows[name] for m in measured), strict=True)
    return [
        Entry(
            bias=statistics.median(e.bias for e in column),
            noise=statistics.median(e.noise for e in column),
        )
        for column in columns
    ]


def less_biased(measured: list[Measured], name: str) -> int:
    """Worlds in which the row is less biased than no correction at the largest staleness."""
    return sum(m.rows[name][-1].bias < m.rows[NOTHING][-1].bias for m in measured)


def document(measured: list[Measured]) -> str:
    kls = [statistics.median(m.kls[i] for m in measured) for i in range(len(STEPS))]
    columns = [f"{steps} back, KL {abs(kl):.2g}" for steps, kl in zip(STEPS, kls, strict=True)]
    lines = [
        "# The bias of off-policy corrections",
        "",
        *HEAD,
        "",
        f"Machine: {machine.describe()}; {date.today()}.",
        "",
    ]
    lines += [
        "| correction | " + " | ".join(columns) + " | less biased than none |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name in ROWS:
        cells = " | ".join(
            f"{entry.bias:.3f} ± {entry.noise:.1f}" for entry in medians(measured, name)
        )
        better = "" if name == NOTHING else f"{less_biased(measured, name)} of {len(measured)}"
        lines.append(f"| {name} | {cells} | {better} |")
    return "\n".join([*lines, "", *READING, ""])


HEAD = (
    f"Written by `.venv/bin/python benchmarks/bias.py`. {len(WORLDS)} toy policies ({TOKENS} "
    f"tokens, up to {HORIZON} of them,",
    "31 sequences, normal rewards; half are tables of logits, half two layers) learn from "
    "groups of two episodes that they",
    f"sampled some steps of length {STEP_LENGTH} along the exact gradient ago; KL(behaviour "
    "|| policy) in nats an episode.",
    "Entries: |E[estimate] - gradient| / |gradient| ± standard deviation of one group's "
    "estimate / |gradient|, in each world",
    "a sum over all 961 groups without sampling error, then the median over the worlds. Last "
    "column: worlds in which the",
    "row is less biased than no correction after 8 steps.",
    "",
    f"Advantages `rloo`, aggregation `fixed_length`; floor {LOW}, cap {CAP}, clip {CLIP}, "
    f"`max_logprob_error` {MAX_ERROR};",
    "the first update of a step, where the ratio of policy and proximal policy is 1.",
)
READING = (
    "What it shows, held by tests/rl/test_expectation.py:",
    "",
    "- Fresh episodes: every row is unbiased in every world.",
    "- Only the ratio of the whole sequence is unbiased for stale ones, and it becomes the "
    "noisiest. `tis_sequence` and `mis`",
    "  are the same below the cap; where it binds, truncating is less biased than masking.",
    "- A ratio of single tokens is biased from the first stale step: the prefixes of the "
    "episodes, and what follows, are",
    "  still the older policy's. `decoupled` is better than nothing in most worlds, not in "
    "all. Bounding it adds bias:",
    "  `tis`, then `icepop`.",
    "- `ppo_clip` around the engine's log-probs stops tokens that have already moved by the "
    "clip in the direction of their",
    "  advantage. That bounds the step, and is the largest bias of all once it binds.",
)


if __name__ == "__main__":
    sys.exit(main())
