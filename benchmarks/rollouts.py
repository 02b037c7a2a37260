"""Share of the engine's batch in use while tools are slow: 64 episodes at once, 0 to 500 ms for
every answer.

    python benchmarks/rollouts.py

for SmolLM2-135M (runs/smollm2/model, see `make smollm2`) and a tiny model.

Turns are of a fixed length, so only the waiting differs. Three ways: 64 episodes under way; 96
under way for a batch of 64; and lock-step, where a turn begins when every episode has its answer,
as loops without concurrency do. The batch is measured at every pass, by the seconds it takes, from
the first to the last moment at which there are episodes to fill it. Writes results/rollouts.json.
"""

import asyncio
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import machine  # noqa: E402

from tandem.config.schema import Env as EnvConfig  # noqa: E402
from tandem.data.renderer import load_renderer  # noqa: E402
from tandem.engine.engine import Engine  # noqa: E402
from tandem.model.load import load_model  # noqa: E402
from tandem.model.tiny import make_tiny  # noqa: E402
from tandem.rollout.env_pool import EnvPool  # noqa: E402
from tandem.rollout.episode_builder import new_groups  # noqa: E402
from tandem.rollout.episodes import run_episodes  # noqa: E402
from tandem.runtime import numerics  # noqa: E402
from tandem.runtime.rng import address  # noqa: E402
from tandem.types import Env, Observation, Problem, SamplingParams  # noqa: E402

BATCH, EPISODES, TURNS, TOKENS, SLOWEST_S = 64, 192, 3, 32, 0.5


class MeasuredEngine(Engine):
    """Ends every turn after its last token, and notes (seconds, sequences) of each pass."""

    def step(self):
        start = time.perf_counter()
        got = super().step()
        self.passes.append((start, time.perf_counter() - start, len(got)))
        return got

    def _ending(self, sequence):
        full = len(sequence.tokens) >= sequence.request.params.max_new_tokens
        return ("ok", "stop") if full else None


class Tool(Env):
    """Answers after 0 to 500 ms, by the address of the turn."""

    barrier: asyncio.Barrier | None = None

    async def reset(self, problem):
        self.uid, self.turn = problem.uid, 0
        return problem.messages

    async def step(self, text):
        self.turn += 1
        await asyncio.sleep(address(self.uid, self.turn) % 1000 / 1000 * SLOWEST_S)
        if self.barrier is not None:
            await self.barrier.wait()
        return Observation(
            messages=({"role": "user", "content": "go on"},), done=self.turn == TURNS
        )


def measure(model, renderer, *, under_way: int, lock_step: bool) -> dict[str, float]:
    engine = MeasuredEngine(model, renderer.decode, cache_bytes=3 << 30, max_batch=BATCH)
    engine.passes = []
    problems = [
        Problem(
            uid=f"q{n}", messages=({"role": "user", "content": f"Tell me about {n}"},), answer=""
        )
        for n in range(EPISODES)
    ]
    Tool.barrier = asyncio.Barrier(under_way) if lock_step else None
    start = time.perf_counter()
    run_episodes(
        new_groups(problems, 1, ("bench",)),
        engine=engine,
        renderer=renderer,
        envs=EnvPool(make=Tool, limits=EnvConfig(concurrency=under_way)),
        sampling=SamplingParams(max_new_tokens=TOKENS),
    )
    seconds = time.perf_counter() - start
    # from when the first batch is full to when there are fewer episodes left than the batch has
    # room for
    last = next(
        at
        for at, left in zip(starts(engine.passes), remaining(engine.passes), strict=True)
        if left < BATCH * TOKENS
    )
    inside = [(begin, took, count) for begin, took, count in engine.passes if begin < last]
    span = inside[-1][0] + inside[-1][1] - inside[0][0]
    return {
        "batch": sum(took * count for _, took, count in inside) / span / BATCH,
        "tokens_per_s": EPISODES * TURNS * TOKENS / seconds,
        "seconds": seconds,
    }


def starts(passes):
    return [start for start, _, _ in passes]


def remaining(passes):
    """Tokens that are still to be sampled at each pass."""
    left, found = EPISODES * TURNS * TOKENS, []
    for _, _, count in passes:
        found.append(left)
        left -= count
    return found


def main() -> int:
    numerics.prepare()
    if (share := machine.others_cpu_share()) > 0.10:
        print(
            f"error: other processes use {share:.0%} of the CPU\n  expected: at most 10%",
            file=sys.stderr,
        )
        return 2
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder)
        paths = {
            "tiny model, 0.9M": folder,
            "SmolLM2-135M": str(ROOT / "runs" / "smollm2" / "model"),
        }
        for name, path in paths.items():
            if not Path(path).is_dir():
                print(f"{name}: not there; `make smollm2` makes it", file=sys.stderr)
                continue
            model, renderer = load_model(path), load_renderer(path)
            for way, schedule in {
                "64 under way": {"under_way": 64, "lock_step": False},
                "96 under way": {"under_way": 96, "lock_step": False},
                "lock-step": {"under_way": 64, "lock_step": True},
            }.items():
                rows[f"{name}, {way}"] = measure(model, renderer, **schedule)
                print(name, way, rows[f"{name}, {way}"], flush=True)
    about = {"machine": machine.describe(), "date": str(date.today()), "rows": rows}
    (ROOT / "results" / "rollouts.json").write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
