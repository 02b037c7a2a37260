"""`tandem plan`: check whether a run could start here, without loading weights: values and their
origin, data, memory, disk, and the verdict.

    tandem plan my.toml                of `tandem train`; exit code 0 if it could start, else 2
    tandem plan my.toml --for sft      of another command that trains
    tandem plan my.toml --values       every value, those too that are the default
    tandem plan my.toml --time         the seconds of a step too, measured in small

It makes the checks of the run itself before its weights (jobs/inputs.py, run_folder/folder.py,
train_loop.py). Memory is arithmetic over the shapes. It does not know whether anything is learned.

Rollout workers that keep a trainer busy are told by what a run in the folder has measured
(timings.jsonl): ceil(generated tokens a step / (trainer seconds a step * tokens/s of a worker)).
These are medians over steps, without the first two, as processes start in them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tandem.choices import machine_of, trainer_of
from tandem.cli.progress import WIDTH, console
from tandem.config.recipe import describe, toml_value
from tandem.config.schema import Config
from tandem.jobs.engines import open_envs_and_rewards
from tandem.jobs.input_hashes import KEYS, input_hashes
from tandem.jobs.inputs import ProblemInputs
from tandem.jobs.models import placement, releases_cache
from tandem.model import custom_code
from tandem.model.config_file import check_model
from tandem.model.rope import positions_of
from tandem.plugins.plan.footprint import (
    Machine,
    Need,
    disk,
    gpu_memory,
    host_memory,
    model_sizes,
    needs,
)
from tandem.plugins.plan.plan_memory import Batch, batch_of, rows_here
from tandem.registry import find
from tandem.run_folder.folder import check_run, has_steps, resolved
from tandem.run_folder.metrics import Metrics, read_metrics
from tandem.run_folder.read import open_past
from tandem.run_folder.resume import resumable
from tandem.run_folder.trackers.links import require_trackers
from tandem.runtime.disk import human_bytes, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.types import Attempt, Problem

SKIPPED = 2  # steps of timings


def plan(
    config: Config,
    command: str,
    folder: Path,
    origins: Mapping[str, str],
    *,
    every: bool = False,
    timed: bool = False,
    out: Path | None = None,
    machine: Machine | None = None,
) -> int:
    """Print the plan of a command that trains in a run folder; return the exit code, 0 if the run
    could start.

    origins: of the values (config/origins.py); every: print all of them. timed: measure the seconds
    of a step. out: a JSON file for the figures.
    """
    find("inputs", command, key="--for")  # raises for a command without a plan
    custom_code.allow(config.model.trust_remote_code)
    made = _Plan(config, command, folder, machine or Machine.here(folder))
    made.show_values(origins, every)
    made.show_needs()
    if timed and not made.reasons:
        made.show_time()
    made.show_verdict()
    if out is not None:
        write_atomic(out, json.dumps(made.figures, indent=1).encode() + b"\n")
    return 2 if made.reasons else 0


class _Plan:
    def __init__(self, config: Config, command: str, folder: Path, machine: Machine):
        self.config, self.command, self.folder, self.machine = config, command, folder, machine
        self.reasons: list[str] = []  # why it could not start
        self.longest = 0  # tokens of a prompt, chat or answer to train on
        self.first_problem: Problem | None = None
        self.figures: dict[str, Any] = {}  # bytes and seconds, for programs
        self.batch: Batch | None = None  # without, the data could not be read

    def show_values(self, origins: Mapping[str, str], every: bool) -> None:
        here = dict[str, str]()
        with self._checked():
            here = values_here(self.config, self.command, self.folder)
        _say("values" if every else "values that are not the default, or open (all: --values)")
        for line in value_lines(self.config, self.command, origins, here, every=every):
            _say(line)

    def show_needs(self) -> None:
        _say("data")
        with self._checked():
            self._data()
        with self._checked():
            if self.command != "rm":  # a reward model plays no episodes
                self._reward()
        with self._checked():
            machine_of(self.config).check_ranks(self.config)
        with self._checked():
            require_trackers(self.config.run.trackers)
        with self._checked():
            sizes = model_sizes(self.config, self.command)
            rows = needs(sizes, self.config, self.command, self.longest)
            there = self.machine.memory
            # several processes, or another backend, divide the model
            divided = self.config.parallel.processes > 1 or not trainer_of(self.config).runs_alone
            if self.batch and not sizes.on_gpu and not divided:
                rows = rows_here(rows, sizes, self.config, self.command, self.batch)
            if host := host_memory(sizes, self.config):
                self._need("memory of the GPU", rows, gpu_memory(sizes.place), "of this GPU")
                self._need("memory", host, there, "in this machine")
            else:
                self._need("memory", rows, there, "in this machine")
            self._need(
                "disk", disk(sizes, self.config), self.machine.disk, f"free for {self.folder}"
            )
        if self.command in ("train", "distill"):
            with self._checked():
                _say("rollout workers that keep the trainer busy")
                if (found := measured(self.folder)) is None:
                    _say(f"  not measured: there are no timings of a run in {self.folder}")
                    return
                speed = f"{found.worker_tokens_per_s:,.0f} tokens/s of a worker"
                formula = f"{found.tokens:,.0f} tokens a step / ({found.trainer_s:.3g} s x {speed})"
                medians = f"medians of {counted(found.steps, 'steps')} in {self.folder}"
                _say(f"  {found.workers}  {formula}, {medians}")

    def show_time(self) -> None:
        """Measure the seconds of a step. A trial that fails says nothing against the run: its
        models are random."""
        from tandem.plugins.plan.plan_time import step_time

        _say("seconds of a step")
        layers = (
            check_model(self.config.model.path, head="value").get_text_config().num_hidden_layers
        )
        try:
            found = step_time(self.config, self.command, layers)
        except UserError as error:
            _say("\n".join(f"  {line}" for line in f"not measured: {error}".splitlines()))
            return
        self.figures["step_s"] = found.seconds
        _say(f"  {found}")

    def show_verdict(self) -> None:
        news = "a new run"
        with self._checked():
            if check_run(self.folder, self.config, self.command) and not self.reasons:
                hashes = input_hashes(self.config, *KEYS[self.command]) | self.images
                checkpoint = resumable(
                    self.folder, self.config, hashes, lambda line: _say(f"  {line}")
                )
                news = (
                    f"resumed from {checkpoint[0].name}" if checkpoint else "a run to begin again"
                )
        if self.reasons:
            _say(f"not ready: {'; '.join(self.reasons)}")
        else:
            if self.command in ("train", "distill"):
                tokens = _episodes(self.config) * self.config.rollout.max_new_tokens
                updates = self.config.rl.minibatches * self.config.rl.epochs
                done = f"{counted(tokens, 'sampled tokens')} at most, {counted(updates, 'updates')}"
                _say(f"a step\n  {done}")
            _say(f"ready: {work(self.config, self.command)}, {news} in {self.folder}")
        self.figures |= {"ready": not self.reasons, "reasons": self.reasons}

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Print a UserError raised inside, and let the plan go on."""
        try:
            yield
        except UserError as error:
            # two parts may need the same file
            if (reason := error.what.splitlines()[0]) not in self.reasons:
                _say("\n".join(f"  {line}" for line in f"error: {error}".splitlines()))
                self.reasons.append(reason)

    def _data(self) -> None:
        inputs = find("inputs", self.command, key="--for")(self.config)
        problems = inputs.problems if isinstance(inputs, ProblemInputs) else inputs.held_out
        self.first_problem = next(iter(problems), None)
        self.images = inputs.images
        self.batch = batch_of(self.config, self.command, inputs.counts)
        for key, count in inputs.counts.items():
            self.longest = max(self.longest, count.longest * key.endswith(".train"))
            text = "prompt" if count.unit == "problems" else "text"
            longest = f"longest {text} {counted(count.longest, 'tokens')}"
            _say(f"  {key:<18}{counted(count.number, count.unit)}, {longest}")
        prompts = [count.longest for count in inputs.counts.values() if count.unit == "problems"]
        places = f"of {positions_of(inputs.shape):,} that the model can place"
        if prompts:
            length = f"{max(prompts)} + {self.config.rollout.max_new_tokens} tokens"
            _say(f"  {'longest sequence':<18}{length}, {places}")

    def _reward(self) -> None:
        """Load environment and reward functions, and score a made-up completion of the first
        problem: a function that cannot would stop the run at its first step."""
        config, problem = self.config, self.first_problem
        with open_envs_and_rewards(config) as (_, rewards):
            others = {"env", "reward_model"} & set(config.reward.functions)
            if problem is None or others or config.env.name != "single_turn":
                return  # what an environment or a model gives cannot be made up
            text = f"Answer: {problem.answer}"
            message = {"role": "assistant", "content": text}
            score = rewards.submit(problem, Attempt(text=text, messages=(message,))).result()
            if score.error:
                [function, *_] = functions = config.reward.functions
                raise UserError(
                    "the reward function cannot score a completion of the first problem",
                    where=f"reward.function = {', '.join(functions)}; problem {problem.uid}",
                    found=score.error,
                    expected=f"a number for {text!r:.60}",
                    next=f"tandem try {function} --data FILE --answer {text!r:.60}",
                )
            _say("reward of a made-up completion, to see that the function runs")
            _say(f"  {score.reward:g} for the first problem and {text!r:.40}")
            if not score.reward:
                _say("  0 is no mistake where another form of the answer is wanted")

    def _need(self, title: str, rows: list[Need], there: int, where: str) -> None:
        needed = sum(count for _, count, _ in rows)
        self.figures[title] = {name: count for name, count, _ in rows}
        _say(title)
        for name, count, formula in rows:
            _say(f"  {name:<17}{human_bytes(count):>10}  {formula}")
        _say(f"  {'sum':<17}{human_bytes(needed):>10}  of {human_bytes(there)} {where}")
        if needed > there:
            self.reasons.append(
                f"{title}: {human_bytes(needed)} needed, {human_bytes(there)} {where}"
            )


def _say(text: str) -> None:
    console.print(text, markup=False)


def _episodes(config: Config) -> int:
    """Count the episodes of a step, at most."""
    return config.rl.prompts_per_step * config.rl.group_size * max(1, config.rl.max_gen_batches)


def work(config: Config, command: str) -> str:
    """Describe the work of a run in a few words."""
    if command in ("train", "distill"):
        episodes, bound = _episodes(config), "at most " if config.rl.max_gen_batches else ""
        return f"{counted(config.run.steps, 'steps')} of {bound}{counted(episodes, 'episodes')}"
    settings, unit = (config.sft, "chats") if command == "sft" else (config.preference, "pairs")
    return f"{counted(settings.steps, 'steps')} of {counted(settings.batch_size, unit)}"


# ---------------------------------------------------------------- values and their origin

# the commands that read a section, of those that not every one reads
_COMMANDS = {
    "sft": ("sft",),
    "preference": ("dpo", "rm"),
    "distill": ("distill",),
    "critic": ("train",),
    "rl": ("train", "distill"),
}


def value_lines(
    config: Config,
    command: str,
    origins: Mapping[str, str],
    here: Mapping[str, str],
    *,
    every: bool,
) -> Iterator[str]:
    """Yield a line for each value, two where one would be too wide. here: what becomes of values
    on this machine, by key; every: those too that are the default and stay as they are, or are of
    another command."""
    tree = config.model_dump()
    for key, default, _ in describe():
        section, _, name = key.partition(".")
        value, origin = toml_value(tree[section][name]), origins[key]
        of_others = command not in _COMMANDS.get(section, command)
        if not every and (of_others or (value == default and key not in here)):
            continue
        other = f"; default {default}" if value != default else ""
        given, about = f"  {key} = {value}", origin + other
        about += f"; here {here[key]}" if key in here else ""
        yield (
            f"{given}    {about}" if len(given + about) + 4 <= WIDTH else f"{given}\n      {about}"
        )


def values_here(config: Config, command: str, folder: Path) -> dict[str, str]:
    """Describe, by key, what the values that leave it open become on this machine, and why. Raises
    UserError for a device that is not there."""
    place, now = placement(config), resolved(config, folder)
    on_gpu = place.device.type == "cuda"
    kept = "as the run in the folder began"
    share = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "one a core"
    threads = kept if has_steps(folder) else share
    dtype = kept if has_steps(folder) else f"that of a {'GPU' if on_gpu else 'CPU'}"
    device = "the first GPU" if on_gpu else "as PyTorch finds no GPU"
    released = "a GPU's memory is the scarce one" if on_gpu else "there is no GPU"
    transport = machine_of(config).usual_transport
    model = f"model.path, {config.model.path}"
    samples = command in ("train", "distill")
    open_values = [
        ("run.folder", "", f"{folder}", True),
        ("run.threads", 0, f"{now.run.threads}, {threads}", True),
        ("model.device", "auto", f"{place.device}, {device}", True),
        ("model.dtype", "auto", f"{now.model.dtype}, {dtype}", True),
        ("model.reference", "", model, command == "dpo" or bool(config.rl.kl_coef)),
        ("critic.path", "", model, command == "train" and config.rl.estimator.needs_critic),
        (
            "rollout.release_cache",
            "auto",
            f"{str(releases_cache(config, place)).lower()}, {released}",
            samples,
        ),
        ("weights.transport", "auto", transport, samples and bool(config.rollout.workers)),
    ]
    tree = config.model_dump()
    return {
        key: text
        for key, unset, text, used in open_values
        if used and tree[key.partition(".")[0]][key.partition(".")[2]] == unset
    }


# ---------------------------------------------------------------- rollout workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Measured medians of a step, and of one rollout worker."""

    steps: int  # measured
    tokens: float  # generated in a step
    trainer_s: float  # of a step: updates and publication
    worker_tokens_per_s: float

    @property
    def workers(self) -> int:
        """Workers that generate a step's tokens while the trainer makes a step."""
        return math.ceil(self.tokens / (self.trainer_s * self.worker_tokens_per_s))


def measured(folder: Path) -> Throughput | None:
    """Read what a run folder has measured; None if it has no run, or too few steps."""
    if not (folder / "config.toml").exists():
        return None
    workers = max(1, open_past(folder).config.rollout.workers)  # without: the trainer's own engine
    rows = [row for row in read_metrics(folder, "timings.jsonl") if row.get("rollout_s")]
    rows = rows[SKIPPED:]
    if not rows:
        return None
    tokens = [row["generated_tokens_per_s"] * row["rollout_s"] for row in rows]
    return Throughput(
        steps=len(rows),
        tokens=median(tokens),
        trainer_s=median(row["learn_s"] + row["sync_s"] for row in rows),
        worker_tokens_per_s=median(
            count / busy_s(row) / workers for count, row in zip(tokens, rows, strict=True)
        ),
    )


def busy_s(row: Metrics) -> float:
    """Return the seconds of the workers on a step, at most: those of its rollouts, or those between
    two steps where several are rolled out at once."""
    between = row["wait_s"] + row["learn_s"] + row["sync_s"] if "wait_s" in row else math.inf
    return min(row["rollout_s"], between)
