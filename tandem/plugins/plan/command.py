"""`tandem plan`: check whether a run could start here, without loading weights: values and their
origin, data, memory, disk, and the verdict.

    tandem plan my.toml                of `tandem train`; exit code 0 if it could start, else 2
    tandem plan my.toml --for sft      of another command that trains
    tandem plan my.toml --values       every value, those too that are the default

It makes the checks of the run itself before its weights (jobs/inputs.py, choices.py, train_loop.py,
run_folder/folder.py). Memory is arithmetic over the shapes. It knows neither whether anything is
learned nor how long a step takes: that says a run with run.steps=3, in its timings.jsonl.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.choices import choices, machine_of
from tandem.cli.progress import WIDTH, console
from tandem.config.recipe import describe, toml_value
from tandem.config.schema import Config, is_read
from tandem.config.training import RATED
from tandem.data.own_calls import warn_of_unread_calls
from tandem.jobs.engines import open_envs_and_rewards
from tandem.jobs.inputs import ProblemInputs
from tandem.jobs.models import placement, releases_cache
from tandem.jobs.stage import SAMPLING
from tandem.model import custom_code
from tandem.model.rope import positions_of
from tandem.plugins.plan.footprint import Batch, Footprint, Need, batch_of, model_sizes, rows_here
from tandem.registry import find
from tandem.run_folder.folder import check_run, resolved
from tandem.run_folder.resume import resumable
from tandem.run_folder.tracking import require_trackers
from tandem.runtime.disk import existing_parent, human_bytes, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.types import Attempt, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory and disk that a run may use, in bytes."""

    memory: int  # of the machine, or of the container
    disk: int  # free for the run folder, with the space that its old checkpoints give back

    @classmethod
    def here(cls, folder: Path) -> "Machine":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        names = "memory.max", "memory/memory.limit_in_bytes"
        limits = [Path("/sys/fs/cgroup") / name for name in names]
        texts = [limit.read_text().strip() for limit in limits if limit.is_file()]
        memory = min([memory, *(int(text) for text in texts if text.isdecimal())])
        held = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step_*/*"))
        return cls(memory=memory, disk=shutil.disk_usage(existing_parent(folder)).free + held)


def plan(
    config: Config,
    command: str,
    folder: Path,
    origins: Mapping[str, str],
    *,
    every: bool = False,
    out: Path | None = None,
    machine: Machine | None = None,
) -> int:
    """Print the plan of a command that trains in a run folder; return the exit code, 0 if the run
    could start.

    origins: of the values (origins.py); every: print all of them. out: a JSON file for the figures.
    """
    find("inputs", command, key="--for")  # raises for a command without a plan
    custom_code.allow(config.model.trust_remote_code)
    made = _Plan(config, command, folder, machine or Machine.here(folder))
    made.show_values(origins, every)
    made.show_needs()
    made.show_verdict()
    if out is not None:
        write_atomic(out, json.dumps(made.figures, indent=1).encode() + b"\n")
    return 2 if made.reasons else 0


class _Plan:
    def __init__(self, config: Config, command: str, folder: Path, machine: Machine):
        self.config, self.command, self.folder, self.machine = config, command, folder, machine
        self.now = config  # with the values of this machine, once they are found
        self.reasons: list[str] = []  # why it could not start
        self.errors: list[UserError] = []  # those that it met
        self.longest = 0  # tokens of a prompt, chat or answer to train on
        self.first_problem: Problem | None = None
        self.inputs: Any = None  # jobs.inputs.Inputs, if the data could be read
        self.positions = 0  # that the model can place
        self.figures: dict[str, Any] = {}  # bytes and seconds, for programs
        self.batch: Batch | None = None  # without, the data could not be read

    def show_values(self, origins: Mapping[str, str], every: bool) -> None:
        here = dict[str, str]()
        with self._checked():
            self.now = resolved(self.config, self.folder)
            here = values_here(self.config, self.now, self.command, self.folder)
        _say("values" if every else "values set by you or by this machine (all: --values)")
        for line in value_lines(self.config, self.command, origins, here, every=every):
            _say(line)

    def show_needs(self) -> None:
        _say("data")
        with self._checked():
            self._data()
        with self._checked():
            if self.command != "rm":  # a reward model plays no episodes
                self._reward()
        for choice in choices(self.config) if self.command in SAMPLING else ():
            with self._checked():
                choice.check(self.config)
        with self._checked():
            machine_of(self.config).check_ranks(self.config)
        with self._checked():
            require_trackers(self.config.run.trackers)
        with self._checked():
            config, longest = self.now, self.longest
            sizes = model_sizes(config, self.command)
            run = Footprint(sizes=sizes, config=config, command=self.command, longest=longest)
            there = self.machine.memory
            if host := run.on_host():
                gpu = torch.cuda.get_device_properties(sizes.place.device).total_memory
                self._need("memory of the GPU", run.needs(), gpu, "of this GPU")
                self._need("memory", host, there, "in this machine")
            else:
                # several processes, or another backend, divide the model
                rows = rows_here(run, self.batch) if self.batch and not run.divided else run.needs()
                self._need("memory", rows, there, "in this machine")
            self._need("disk", run.disk(), self.machine.disk, f"free for {self.folder}")

    def show_verdict(self) -> None:
        news = "a new run"
        with self._checked():
            if not self.reasons and check_run(self.folder, self.config, self.command):
                hashes = self.inputs.hashes(self.config)
                checkpoint = resumable(
                    self.folder, self.config, hashes, lambda line: _say(f"  {line}")
                )
                news = (
                    f"resumed from {checkpoint[0].name}" if checkpoint else "a run to begin again"
                )
        for error in self.errors:
            _say(f"error: {error}")
        if self.reasons:
            _say(f"not ready: {'; '.join(self.reasons)}")
        else:
            _say(f"ready: {self._work()}, {news} in {self.folder}")
        self.figures |= {"ready": not self.reasons, "reasons": self.reasons}

    def _work(self) -> str:
        """Describe the run in a few words, and print what a step of it is."""
        config = self.config
        if self.command in ("train", "distill"):
            rl = config.rl
            episodes = rl.prompts_per_step * rl.group_size * max(1, rl.max_gen_batches)
            turns = 1 if config.env.name == "single_turn" else config.env.max_turns
            tokens = episodes * turns * config.rollout.max_new_tokens
            updates = rl.minibatches * rl.epochs
            _say("a step")
            _say(f"  {counted(tokens, 'sampled tokens')} at most, {counted(updates, 'updates')}")
            if turns > 1:
                rows = counted(episodes * (turns if config.rollout.renders else 1), "sequences")
                most = config.env.max_tokens
                text = f" of {most:,} tokens" * bool(most)
                _say(f"  {rows}{text} at most (rollout.history = {config.rollout.history})")
            bound = "at most " if rl.max_gen_batches else ""
            return f"{counted(config.run.steps, 'steps')} of {bound}{counted(episodes, 'episodes')}"
        is_sft = self.command == "sft"
        section, unit = (config.sft, "chats") if is_sft else (config.preference, "pairs")
        return f"{counted(section.steps, 'steps')} of {counted(section.batch_size, unit)}"

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Let the plan go on after a UserError, which the verdict prints whole."""
        try:
            yield
        except UserError as error:
            # two parts may need the same file
            if (reason := error.what.splitlines()[0]) not in self.reasons:
                _say(f"  error: {reason}")
                self.errors.append(error)
                self.reasons.append(reason)

    def _data(self) -> None:
        self.inputs = inputs = find("inputs", self.command, key="--for")(self.config)
        problems = inputs.problems if isinstance(inputs, ProblemInputs) else inputs.held_out
        self.first_problem = next(iter(problems), None)
        self.positions = positions_of(inputs.shape)
        self.batch = batch_of(self.config, self.command, inputs.counts)
        for key, count in inputs.counts.items():
            self.longest = max(self.longest, count.longest * key.endswith(".train"))
            text = "prompt" if count.unit == "problems" else "text"
            longest = f"longest {text} {counted(count.longest, 'tokens')}"
            _say(f"  {key:<18}{counted(count.number, count.unit)}, {longest}")
        prompts = [count.longest for count in inputs.counts.values() if count.unit == "problems"]
        if prompts:
            length = f"{max(prompts)} + {self.config.rollout.max_new_tokens} tokens"
            limit = self.config.env.max_tokens
            by = "env.max_tokens allows" if limit else "the model can place"
            places = f"of {limit or self.positions:,} that {by}"
            _say(f"  {'longest sequence':<18}{length}, {places}")

    def _reward(self) -> None:
        """Load environment and reward functions, and score a made-up completion of the first
        problem: a function that cannot would stop the run at its first step."""
        config, problem = self.config, self.first_problem
        with open_envs_and_rewards(config) as (envs, rewards):
            if (tools := envs.make().tools) and problem is not None:
                warn_of_unread_calls(self.inputs.renderer)
                render, chats = self.inputs.renderer.prompts, [problem.messages]
                added = len(render(chats, tools)[0]) - len(render(chats)[0])
                counts = self.inputs.counts.values()
                longest = added + max(c.longest for c in counts if c.unit == "problems")
                if longest >= self.positions:
                    raise UserError(
                        "a prompt with its tools leaves no room for an answer",
                        where=f"env.name = {config.env.name}, model.path = {config.model.path}",
                        found=f"{longest:,} tokens, {added:,} of them about the tools",
                        expected=f"fewer than {self.positions:,}, which the model can place",
                        next="fewer tools, shorter descriptions, or a model with more context; "
                        f"a tiny one: tandem tiny DIR --context {2 * longest}",
                    )
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
                    next=f"tandem try {function} --recipe RECIPE --answer {text!r:.60}",
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


# ---------------------------------------------------------------- values and their origin


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
        if not every and (not is_read(command, key) or (value == default and key not in here)):
            continue
        other = f"; default {default}" if value != default else ""
        given, about = f"  {key} = {value}", origin + other
        about += f"; here {here[key]}" if key in here else ""
        between = "    " if len(given + about) + 4 <= WIDTH else "\n      "
        yield given + between + about


def values_here(config: Config, now: Config, command: str, folder: Path) -> dict[str, str]:
    """Describe, by key, what the values that leave it open become on this machine, in `now`. Raises
    UserError for a device that is not there."""
    place = placement(config)
    released = str(releases_cache(config, place)).lower()
    transport = machine_of(config).usual_transport
    model = f"model.path, {config.model.path}"
    samples = command in ("train", "distill")
    open_values = [
        ("run.folder", "", f"{folder}", True),
        ("run.threads", 0, f"{now.run.threads}", True),
        ("model.device", "auto", f"{place.device}", True),
        ("model.dtype", "auto", f"{now.model.dtype}", True),
        ("model.reference", "", model, command == "dpo" or bool(config.rl.kl_coef)),
        ("critic.path", "", model, command == "train" and config.rl.estimator.needs_critic),
        ("rollout.release_cache", "auto", released, samples),
        ("weights.transport", "auto", transport, samples and bool(config.rollout.workers)),
        *(
            (f"{name}.learning_rate", "auto", f"{getattr(now, name).learning_rate}, {model}", True)
            for name in RATED
        ),
    ]
    tree = config.model_dump()
    return {
        key: text
        for key, unset, text, used in open_values
        if used and tree[key.partition(".")[0]][key.partition(".")[2]] == unset
    }
