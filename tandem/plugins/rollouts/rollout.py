"""`tandem rollout`: every training problem once, in order, generated and scored without training.

    tandem rollout my.toml --out runs/rollout       a folder with a Parquet file for each batch
    tandem rollout my.toml --out episodes.jsonl     the same in episodes.jsonl.rollout/, and when
                                                    all are there a line for each episode
    tandem rollout my.toml --keep LOW:HIGH          runs/rollout.kept.jsonl: a data file to train on

A batch is `rl.prompts_per_step` problems. It counts once its episodes and then its row in
metrics.jsonl are durable; a kill leaves at most parts of the next one, which is made again with the
same bits. config.toml and rollout.json name the inputs of the batches.

It does not know the trainer. Config, lock, log and the rows of the batches are those of any run
folder (run_folder/folder.py).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tandem.cli.progress import console
from tandem.config.episodes import Data
from tandem.config.schema import Config
from tandem.jobs.engines import open_runner, prepare_process
from tandem.jobs.input_hashes import image_hashes, input_hashes
from tandem.jobs.inputs import read_data
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import episode_metrics
from tandem.rollout.score import RolloutRunner, generate_and_score, sampling_params
from tandem.run_folder.episode_files import episode_file, json_lines, read_table, write_episodes
from tandem.run_folder.files import RESTORE_OR_FRESH, read_file
from tandem.run_folder.folder import RunFolder, open_run
from tandem.run_folder.metrics import MetricsWriter, peak_rss_mb, read_metrics
from tandem.run_folder.resume import require_same_inputs
from tandem.run_folder.status import ROLLOUT, write_status
from tandem.runtime.disk import DISK, disk_errors, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import keep_in
from tandem.runtime.timer import Timer
from tandem.runtime.wording import counted
from tandem.types import Group, Problem, Row

MakeBatch = Callable[[int, Timer], list[Group]]  # the scored episodes of a batch, counted from 0

DEFAULT_OUT = Path("runs/rollout")
KEPT = ".kept.jsonl"
BESIDE_JSONL = ".jsonl.rollout"


def rollout(
    config: Config, out: Path | None, fresh: bool = False, bounds: tuple[float, float] | None = None
) -> None:
    """Generate the missing batches; with bounds also write the data file of the problems whose mean
    reward lies within them.

    Raises UserError for an output that belongs to something else, or to another config, data file
    or model.
    """
    output = Output(out or DEFAULT_OUT)
    output.check()
    with disk_errors(output.path):
        output.path.parent.mkdir(parents=True, exist_ok=True)
    prepare_process(config)
    with open_output(output, config, fresh) as run:
        config = run.config
        keep_in(run.path / "images")
        problems = read_data(config, "data.train")
        inputs = hashes(config) | image_hashes(problem.messages for problem in problems)
        if is_complete(output, inputs):
            run.note_start()
            batches = len(read_metrics(run.path))
            cut_episodes(output.folder, batches - 1)
            output.export()
            write_status(run.path, batches, batches, [])
            console.print(f"complete, nothing to do: {summary_line(run.path)}")
        else:
            with open_runner(config, problems, "data.train", console.print) as (runner, problems):
                batches = -(-len(problems) // config.rl.prompts_per_step)
                make = partial(make_batch, config, problems, runner)
                run.note_start()
                write_batches(output, batches, inputs, make)
            require_scores(run.path, config)
            console.print(f"done: {summary_line(run.path)}")
            run.log(f"done: {batches} batches in {output.path}")
    if out is None:
        console.print(f"episodes in {DEFAULT_OUT}; --out names another folder, or FILE.jsonl")
    if bounds is not None:
        means = mean_rewards(output.files())
        kept = [problem for problem in problems if problem.uid in means]
        console.print(keep(kept, means, bounds, output.kept, config.data), markup=False)


def make_batch(
    config: Config, problems: Sequence[Problem], runner: RolloutRunner, number: int, timer: Timer
) -> list[Group]:
    """Generate and score the problems of a batch."""
    size = config.rl.prompts_per_step
    part = problems[number * size : (number + 1) * size]
    groups = new_groups(part, config.rl.group_size, (config.run.seed, "rollout only", number))
    sampling = sampling_params(config.rollout, runner.renderer)
    return generate_and_score(runner, groups, sampling=sampling, shaping=config.reward, timer=timer)


def write_batches(output: "Output", batches: int, inputs: dict[str, str], make: MakeBatch) -> None:
    """Make the batches after the last one that counts, up to the end."""
    rows = read_metrics(output.folder)
    done = output.count(rows)
    if not rows:
        begin(output, batches, inputs)
    cut_episodes(output.folder, done - 1)  # all but the batches that count
    with MetricsWriter(output.folder, done - 1) as writer:
        for number in range(done, batches):
            timer = Timer()
            groups = make(number, timer)
            with timer("journal_s"):
                write_episodes(output.folder, number, groups, kind="rollout")
            metrics = batch_metrics(groups)
            timings = timer.timings(tokens=int(metrics["generated_tokens"]))
            writer.write(number, metrics, timings | {"rss_mb": peak_rss_mb()})
            console.print(f"batch {number + 1} of {batches}: {summary([metrics], [timings])}")
            write_status(output.folder, number + 1, batches, [])
    output.export()


def require_scores(folder: Path, config: Config) -> None:
    """Raise UserError if no episode was scored: the reward function is mistaken."""
    if all(row["reward_errors"] == row["episodes"] for row in read_metrics(folder)):
        raise UserError(
            "not one episode could be scored",
            where=f"reward.function = {config.reward.function}",
            found="an error for each, see reward_error of the episodes",
            expected="a score",
            next="mend the function and start over with --fresh",
        )


def batch_metrics(groups: Sequence[Group]) -> Row:
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = sum(int(episode.loss_mask.sum()) for episode in episodes)
    return {**episode_metrics(groups), "episodes": len(episodes), "generated_tokens": tokens}


def summary_line(folder: Path) -> str:
    """Describe all batches, those of earlier starts included."""
    return summary(read_metrics(folder), read_metrics(folder, "timings.jsonl"))


def summary(rows: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]]) -> str:
    """Describe some batches in a line."""
    episodes = sum(row["episodes"] for row in rows)
    reward, truncated = (
        sum(row[name] * row["episodes"] for row in rows) / episodes
        for name in ("reward", "truncated")
    )
    tokens = sum(row["generated_tokens"] for row in rows)
    seconds = sum(row["rollout_s"] for row in timings)
    failed = int(sum(row["reward_errors"] for row in rows))
    return (
        f"{counted(episodes, 'episodes')}, mean reward {reward:.3f}, {truncated:.1%} truncated, "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
        + f", {failed:,} not scored (see reward_error)"
        * bool(failed)
    )


# The output
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a rollout: a Parquet file for each batch in the run folder, and a JSONL file
    made of them if `path` names one."""

    path: Path  # --out

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix == ".jsonl"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._beside(BESIDE_JSONL) if self.is_jsonl else self.path

    @property
    def kept(self) -> Path:
        """The data file of --keep."""
        return self._beside(KEPT)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name.removesuffix(".jsonl") + suffix)

    def check(self) -> None:
        """Raise UserError if something else is at the path. open_run checks that the folder belongs
        to a run."""
        found = ""
        if self.is_jsonl and self.path.is_dir():
            found = "a folder"
        elif self.path.exists() and not self.is_jsonl and not self.path.is_dir():
            found = "a file"
        # A kill in the middle of --fresh leaves the file beside the old run folder only.
        elif self.path.is_file() and not any(self.path.parent.glob(f"{self.folder.name}*")):
            found = f"a file without {self.folder.name} beside it"
        if found:
            raise UserError(
                "the output would overwrite something else",
                where=str(self.path),
                found=found,
                expected="a name that ends in .jsonl, or a folder; that of an earlier rollout, or "
                "a new one",
                next="choose another --out",
            )

    def count(self, rows: Sequence[Row]) -> int:
        """Count the batches that have a row and their file, up to the first without them."""
        files = (episode_file(self.folder, int(row["step"]), "rollout") for row in rows)
        return sum(1 for _ in takewhile(Path.exists, files))

    def files(self) -> Iterator[Path]:
        """Yield the Parquet files, in order."""
        for row in read_metrics(self.folder):
            yield episode_file(self.folder, int(row["step"]), "rollout")

    def export(self) -> None:
        """Write the JSONL file, if one is wanted; it appears whole."""
        if not self.is_jsonl:
            return
        temporary = self.path.with_name(f".tmp-{self.path.name}")
        with disk_errors(self.path):
            with temporary.open("wb") as lines:
                for file in self.files():
                    lines.writelines(json_lines(file))
            DISK.fsync(temporary)
            DISK.rename(temporary, self.path)
            DISK.fsync(self.path.parent)

    def move_aside(self) -> None:
        """Rename the JSONL file that was there before --fresh."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        if self.is_jsonl and self.path.exists():
            with disk_errors(target):
                self.path.rename(target)
                DISK.fsync(target.parent)  # before rollout.json claims the name


@contextmanager
def open_output(output: Output, config: Config, fresh: bool) -> Iterator[RunFolder]:
    """Open the run folder of the output. Its errors advise in the words of this command."""
    try:
        with open_run(output.folder, config, fresh=fresh, command="rollout") as run:
            yield run
    except UserError as error:
        error.next = error.next.replace("run.folder=PATH", "--out PATH")
        error.next = error.next.replace("run.folder", "--out")
        raise


# Whether the output is of the same rollout
# ------------------------------------------------------------------------------


def hashes(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the inputs of the episodes by key, besides the config: problems, model,
    reward function."""
    prefixes = ("data.train", "data.chat_template", "model.path/", "reward.", "env/")
    inputs = input_hashes(config, "data.train").items()
    return {key: value for key, value in inputs if key.startswith(prefixes)}


def begin(output: Output, batches: int, inputs: dict[str, str]) -> None:
    """Record the inputs of the batches. From then on the file at the output is this rollout's."""
    about = output.folder / ROLLOUT
    if not about.exists():
        output.move_aside()
    write_atomic(
        about, json.dumps({"batches": batches, "inputs": inputs}, indent=1).encode() + b"\n"
    )


def is_complete(output: Output, inputs: dict[str, str]) -> bool:
    """Tell whether all batches are there. Raises UserError if some were made from other inputs."""
    rows = read_metrics(output.folder)
    if not rows:
        return False
    about = read_file(output.folder / ROLLOUT, json.loads, RESTORE_OR_FRESH)
    require_same_inputs(about["inputs"], inputs)
    return output.count(rows) == int(about["batches"])


def cut_episodes(folder: Path, after_step: int) -> list[Path]:
    """Remove the files of later steps, of every kind, which a resumed run makes again; return the
    removed paths."""
    unfinished = set(folder.glob(".tmp-*"))  # of a killed write
    later = [
        path
        for path in sorted(set(folder.glob("*.parquet")) - unfinished)
        if (match := re.fullmatch(r".*_step_(\d+)(_\d+)*", path.stem))
        and int(match[1]) > after_step
    ]
    with disk_errors(folder):
        for path in [*later, *unfinished]:
            path.unlink()
    return later


# ---- --keep LOW:HIGH: the problems that are neither solved nor hopeless


def parse_range(text: str) -> tuple[float, float]:
    """Read "0.2:0.8" as (0.2, 0.8). Raises UserError."""
    low, sign, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (1.0, 0.0)
    if not sign or not bounds[0] <= bounds[1]:
        raise UserError(
            "the range of mean rewards cannot be read",
            where="--keep",
            found=repr(text),
            expected="LOW:HIGH with LOW <= HIGH, e.g. 0.2:0.8",
        )
    return bounds


def mean_rewards(files: Iterable[Path]) -> dict[str, float]:
    """Compute the mean reward by uid, over the episodes whose environment did not fail."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for file in files:
        for row in read_table(file, ["uid", "reward", "env_error"]).to_pylist():
            if not row["env_error"]:
                rewards[row["uid"]].append(row["reward"])
    return {uid: float(np.mean(values)) for uid, values in rewards.items()}


def keep(
    problems: Sequence[Problem],
    rates: Mapping[str, float],
    bounds: tuple[float, float],
    path: Path,
    columns: Data,
) -> str:
    """Write the problems whose mean reward lies within the bounds, both included; return a line for
    the user. Raises UserError if there is none."""
    low, high = bounds
    kept = [problem for problem in problems if low <= rates[problem.uid] <= high]
    if not kept:
        spread = np.quantile(list(rates.values()), [0.0, 0.25, 0.5, 0.75, 1.0])
        raise UserError(
            "no problem has a mean reward in that range",
            where=f"--keep {low:g}:{high:g}",
            found="mean rewards with quartiles " + ", ".join(f"{rate:.2f}" for rate in spread),
            expected="a range that some of them lie in",
            next="choose other bounds",
        )
    lines = [
        json.dumps(as_row(p, columns) | {"mean_reward": rates[p.uid]}, ensure_ascii=False)
        for p in kept
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    easy = sum(rate > high for rate in rates.values())
    hard = sum(rate < low for rate in rates.values())
    return (
        f"kept {len(kept):,} of {len(problems):,} problems in {path} "
        f"({easy:,} too easy, {hard:,} too hard)"
    )


def as_row(problem: Problem, columns: Data) -> dict[str, Any]:
    """Make a row that reads back as the same problem under the same column names."""
    prompt = list(problem.messages) if problem.conversational else problem.messages[-1]["content"]
    category = {columns.category_column: problem.category} if problem.category else {}
    named = {columns.prompt_column: prompt, columns.answer_column: problem.answer}
    return {**problem.metadata, "uid": problem.uid, **named, **category}
