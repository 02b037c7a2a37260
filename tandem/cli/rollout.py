"""`tandem rollout`: every training problem once, in order, generated and scored without training.

    tandem rollout my.toml --out episodes.jsonl      a line an episode, and episodes.jsonl.rollout/ beside it
    tandem rollout my.toml --out runs/rollout        a folder with a Parquet file for each batch

A batch is `rl.prompts_per_step` problems. It counts once its episodes and then its row in
metrics.jsonl are durable; whatever else a kill leaves is cut off and made again with the same bits:

    make -> output.append (fsync) -> MetricsWriter.write (fsync)        config.toml, rollout.json: what it is made from

It does not know the trainer. Config, lock, log and the rows of the batches are those of any run
folder (run.py).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tandem.cli.progress import console
from tandem.cli.rollout_filter import keep, kept_path, mean_rewards
from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.jobs.engines import (
    load_engine,
    load_reward_model,
    open_envs_and_rewards,
    prepare_process,
)
from tandem.jobs.inputs import input_hashes, read_data
from tandem.model.load import check_model
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import episode_metrics
from tandem.rollout.evaluate import sampling_params
from tandem.rollout.score import RolloutRunner, generate_and_score
from tandem.run_folder.episode_files import (
    cut_episodes,
    episode_lines,
    read_episodes,
    write_episodes,
)
from tandem.run_folder.folder import RunFolder, open_run
from tandem.run_folder.metrics import MetricsWriter, peak_rss_mb, read_metrics
from tandem.runtime.disk import DISK, append_line, disk_errors, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.types import Group, Problem, Row

Make = Callable[[int, Timer], list[Group]]  # the scored episodes of a batch, counted from 0

DEFAULT_OUT = Path("runs/rollout")
BESIDE_JSONL = ".jsonl.rollout"
ABOUT = "rollout.json"  # how many batches there will be, and the hashes of what they are made from
# of a model directory: tokenizer, chat template, configs
TEXT_FILES = (".json", ".jinja", ".model", ".txt")


def rollout(
    config: Config, out: Path | None, fresh: bool = False, bounds: tuple[float, float] | None = None
) -> None:
    """Generate what is missing; with bounds also the data file of the problems whose mean reward
    lies within them."""
    generate(config, out, fresh)
    if bounds is not None:
        output = output_at(out or DEFAULT_OUT)
        problems = {problem.uid: problem for problem in read_data(config, "data.train")}
        rates = mean_rewards(output.rewards())
        console.print(
            keep(
                [problems[uid] for uid in rates], rates, bounds, kept_path(output.path), config.data
            ),
            markup=False,
        )


def generate(config: Config, out: Path | None, fresh: bool) -> None:
    """Raises UserError for an output that is somebody else's, or of another config, data file or
    model."""
    if out is not None and not out.parent.is_dir():
        raise UserError(
            "the folder of the output does not exist",
            where=str(out.parent),
            expected="a folder",
            next=f"mkdir -p {out.parent}",
        )
    output = output_at(out or DEFAULT_OUT)
    output.check()
    prepare_process(config)
    problems = read_data(config, "data.train")
    with open_output(output, config, fresh) as run:
        inputs = hashes(config)
        if is_complete(run.path, output, inputs):
            output.cut(read_metrics(run.path))  # of whatever stands behind the last batch
            console.print(f"complete, nothing to do: {summary(run.path)}")
            return
        check_model(config.model.path)
        renderer = load_renderer(config.model.path)
        problems = renderer.check_lengths(problems, config.data)
        batches = -(-len(problems) // config.rl.prompts_per_step)
        with batch_maker(config, problems, renderer) as make:
            write_batches(run.path, output, batches, inputs, make)
        require_scores(run.path, config)
        console.print(f"done: {summary(run.path)}")
        run.log(f"done: {batches} batches in {output.path}")


@contextmanager
def batch_maker(
    config: Config, problems: Sequence[Problem], renderer: ChatRenderer
) -> Iterator[Make]:
    params, size = (
        sampling_params(config.rollout, renderer.stop_token_ids),
        config.rl.prompts_per_step,
    )
    with open_envs_and_rewards(config) as (envs, rewards):
        runner = RolloutRunner(
            engine=load_engine(config, renderer, problems, console.print),
            renderer=renderer,
            envs=envs,
            rewards=rewards,
            reward_model=load_reward_model(config),
        )

        def make(number: int, clock: Timer) -> list[Group]:
            part = problems[number * size : (number + 1) * size]
            groups = new_groups(
                part, config.rl.group_size, (config.run.seed, "rollout only", number)
            )
            return generate_and_score(
                runner, groups, sampling=params, shaping=config.reward, timer=clock
            )

        yield make


def write_batches(
    folder: Path, output: "Output", batches: int, inputs: dict[str, str], make: Make
) -> None:
    """Go on behind the last batch that counts, up to the last of all."""
    rows = read_metrics(folder)
    done = output.whole(rows)
    if not rows:
        begin(folder, output, batches, inputs)
    output.cut(rows[:done])
    with MetricsWriter(folder, done - 1) as writer:
        for number in range(done, batches):
            clock = Timer()
            groups = make(number, clock)
            with clock("journal_s"):
                place = output.append(number, groups)
            metrics = {**batch_metrics(groups), **place}
            timings = clock.timings(tokens=int(metrics["generated_tokens"]))
            writer.write(number, metrics, timings | {"rss_mb": peak_rss_mb()})
            console.print(f"batch {number + 1} of {batches}: {told([metrics], [timings])}")


def require_scores(folder: Path, config: Config) -> None:
    """A reward function that fails on everything is a mistake and no result."""
    rows = read_metrics(folder)
    if all(row["reward_errors"] == row["episodes"] for row in rows):
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


def summary(folder: Path) -> str:
    """Of all batches, those of earlier starts included."""
    return told(read_metrics(folder), read_metrics(folder, "timings.jsonl"))


def told(rows: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]]) -> str:
    episodes = sum(row["episodes"] for row in rows)
    reward, truncated = (
        sum(row[name] * row["episodes"] for row in rows) / episodes
        for name in ("reward", "truncated")
    )
    speed = sum(row["generated_tokens"] for row in rows) / max(
        sum(row["rollout_s"] for row in timings), 1e-9
    )
    failed = int(sum(row["reward_errors"] for row in rows))
    return (
        f"{episodes:,} episodes, mean reward {reward:.3f}, {truncated:.1%} truncated, {speed:,.0f} tokens/s"
        + f", {failed:,} not scored (see reward_error)" * bool(failed)
    )


# The two outputs
# -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParquetOutput:
    """A folder that is the run folder too; a file has its real name only when it is whole."""

    path: Path

    @property
    def run_folder(self) -> Path:
        return self.path

    def check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise _foreign(
                self.path,
                "a file",
                "a folder of an earlier rollout, none, or a name that ends in .jsonl",
            )
        if self.path.name.endswith(BESIDE_JSONL):
            raise _foreign(
                self.path,
                f"the name of the folder beside a JSONL file ({BESIDE_JSONL})",
                "another name",
            )

    def whole(self, rows: Sequence[Row]) -> int:
        """How many of the batches that have a row are here."""
        return sum(1 for _ in takewhile(lambda row: self._file(row).exists(), rows))

    def rewards(self) -> Iterator[tuple[str, float]]:
        """(uid, reward) of every episode that is here and could be played."""
        for row in read_metrics(self.path):
            yield from (
                (e.uid, e.reward) for e in read_episodes(self._file(row)) if not e.env_error
            )

    def begin(self) -> None:
        """Nothing stands where the episodes go: open_run has taken the folder."""

    def cut(self, rows: Sequence[Row]) -> None:
        """Leave the batches of these rows only."""
        cut_episodes(self.path, len(rows) - 1)

    def append(self, number: int, groups: Sequence[Group]) -> Row:
        write_episodes(self.path, number, groups, kind="rollout")
        return {}

    def _file(self, row: Row) -> Path:
        return self.path / f"rollout_step_{int(row['step']):06d}.parquet"


@dataclass(frozen=True, slots=True)
class JsonlOutput:
    """A file that only grows; a batch's row says where it ends, so that a torn tail is known by its
    place."""

    path: Path

    @property
    def run_folder(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(".jsonl") + BESIDE_JSONL)

    def check(self) -> None:
        if self.path.is_dir():
            raise _foreign(self.path, "a folder", "a file of an earlier rollout, or none")
        # A kill in the middle of --fresh leaves the file beside the old run folder only.
        ours = any(
            place.name.startswith(self.run_folder.name) for place in self.path.parent.iterdir()
        )
        if self.path.exists() and not ours:
            found = f"a file without {self.run_folder.name} beside it"
            raise _foreign(self.path, found, "a file of an earlier rollout, or none")

    def whole(self, rows: Sequence[Row]) -> int:
        """How many of the batches that have a row are here."""
        size = self._size()
        return sum(1 for _ in takewhile(lambda row: row["file_bytes"] <= size, rows))

    def rewards(self) -> Iterator[tuple[str, float]]:
        """(uid, reward) of every episode that is here and could be played."""
        with self.path.open(encoding="utf-8") as lines:
            rows = map(json.loads, lines)
            yield from ((row["uid"], row["reward"]) for row in rows if not row["env_error"])

    def begin(self) -> None:
        """A file that is there is the one before --fresh, or a user's: it steps aside."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        if self.path.exists():
            with disk_errors(target):
                self.path.rename(target)
                DISK.fsync(target.parent)  # before rollout.json claims the name

    def cut(self, rows: Sequence[Row]) -> None:
        """Leave the batches of these rows only."""
        end = int(rows[-1]["file_bytes"]) if rows else 0
        if self._size() != end:
            with disk_errors(self.path):
                os.truncate(self.path, end)
                DISK.fsync(self.path)

    def append(self, number: int, groups: Sequence[Group]) -> Row:
        lines = episode_lines(number, groups)
        with disk_errors(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            append_line(descriptor, lines, self.path)
        finally:
            os.close(descriptor)
        DISK.fsync(self.path.parent)
        return {"file_bytes": self._size()}

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


Output = ParquetOutput | JsonlOutput


def output_at(path: Path) -> Output:
    return JsonlOutput(path) if path.suffix == ".jsonl" else ParquetOutput(path)


def _foreign(path: Path, found: str, expected: str) -> UserError:
    return UserError(
        "the output would overwrite something else",
        where=str(path),
        found=found,
        expected=expected,
        next="choose another --out",
    )


# The same rollout, or another
# ----------------------------------------------------------------------------------------


@contextmanager
def open_output(output: Output, config: Config, fresh: bool) -> Iterator[RunFolder]:
    """The run folder of the output, locked; what its errors advise is said in this command's
    words."""
    with ExitStack() as stack:
        try:
            run = stack.enter_context(
                open_run(output.run_folder, config, fresh=fresh, command="rollout")
            )
        except UserError as error:
            advice = error.next.replace("run.folder=PATH", "--out PATH").replace(
                "run.folder", "--out"
            )
            raise UserError(
                error.what,
                where=error.where,
                found=error.found,
                expected=error.expected,
                next=advice,
            ) from error
        yield run


def hashes(config: Config) -> dict[str, str]:
    """SHA-256 by key of what the episodes are a function of, besides the config: problems, model,
    reward function."""
    texts = [
        file
        for file in sorted(Path(config.model.path or "none").glob("*"))
        if file.suffix in TEXT_FILES
    ]
    files = {f"model.path/{file.name}": file for file in texts}
    own = ("data.train", "model.path/", "reward.", "env/")
    kept = {
        key: value
        for key, value in input_hashes(config, "data.train").items()
        if key.startswith(own)
    }
    return kept | {
        key: hashlib.sha256(file.read_bytes()).hexdigest()
        for key, file in files.items()
        if file.is_file()
    }


def begin(folder: Path, output: Output, batches: int, inputs: dict[str, str]) -> None:
    """Write down what the batches are made from. Once that is there, the file at the output is this
    rollout's."""
    if not (folder / ABOUT).exists():
        output.begin()
    about = {"batches": batches, "inputs": inputs}
    write_atomic(folder / ABOUT, json.dumps(about, indent=1).encode() + b"\n")


def is_complete(folder: Path, output: Output, inputs: dict[str, str]) -> bool:
    """Refuses to go on with other inputs once a batch counts."""
    rows = read_metrics(folder)
    if not rows:
        return False
    about = _read_about(folder / ABOUT)
    changed = [
        key for key in {**about["inputs"], **inputs} if about["inputs"].get(key) != inputs.get(key)
    ]
    if changed:
        raise UserError(
            "a data file, the model or the reward function has changed since the rollout began",
            where=", ".join(changed),
            found=f"{_short(inputs, changed[0])} as the hash of {changed[0]}",
            expected=f"{_short(about['inputs'], changed[0])}: the episodes that are there were made from that",
            next="restore it, choose another --out PATH, or start over with --fresh (the old output is kept beside it)",
        )
    return output.whole(rows) == about["batches"]


def _short(inputs: dict[str, str], key: str) -> str:
    return f"sha256 {inputs[key][:12]}" if key in inputs else "nothing"


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"batches": int(about["batches"]), "inputs": dict(about["inputs"])}
    # absent, damaged, or of another shape
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "a file of the rollout cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="the file as Tandem wrote it",
            next="restore it, or start over with --fresh (the old output is kept beside it)",
        ) from error
