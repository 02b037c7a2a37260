"""The driver: what it does when steps go bad, and what a resumed run knows of the steps before; a
fake job, a real folder."""

import json
from contextlib import suppress

import pytest
import torch

from tandem.config.schema import Config
from tandem.run_folder.best import Best, read_best
from tandem.run_folder.folder import open_run
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.status import read_status
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.train_loop import TrainJob, run_training
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.types import StepResult
from tests.support.tiny import exact_model

BAD, GOOD = {"bad/loss": 1.0, "bad/gradient": 1.0, "reward": 0.0}, {"reward": 1.0}


class Killed(Exception):
    """Ends a process between two steps."""


class ScriptedJob(TrainJob):
    """Step n has the metrics script[n] ("." good, "x" bad, "K" a kill before it, "^" Ctrl-C); a
    good one adds 1 to a weight."""

    eval_every = 2

    def __init__(self, script, interrupted=None, rewards=()):
        self.rewards = rewards  # held out, of each evaluation; without any there are none
        self.interrupted = interrupted  # the step whose evaluation is
        model = exact_model("llama", num_hidden_layers=1, hidden_size=12, intermediate_size=8)
        optimizer = Optimizer(model.trainable(), Settings(learning_rate=1e-3, total_steps=1))
        self.learner = Learner(model, optimizer)
        self.learners, self.data = {"policy": self.learner}, {"data.train": "0"}
        self.steps = len(script)
        self.script, self.memory, self.restored = script, [], None
        self.published, self.evaluated, self.shown = [], [], []

    def start(self, done):
        self.published.append(done)

    def step(self, done):
        match self.script[done]:
            case "K":
                raise Killed
            case "^":
                raise KeyboardInterrupt
            case "x":
                self.memory.append(f"bad {done}")
                return self.result(BAD)
        self.memory.append(f"good {done}")
        with torch.no_grad():
            next(iter(self.learner.model.trainable().values())).add_(1.0)
        return self.result(GOOD)

    def result(self, metrics):
        return StepResult(metrics=dict(metrics), timings={}, state={"memory": list(self.memory)})

    def restore(self, done, state):
        self.restored, self.memory = (done, state), list(state["memory"])

    def evaluate(self, done):
        if done == self.interrupted:
            raise KeyboardInterrupt
        self.evaluated.append(done)
        held_out = {"eval/sampled": self.rewards[done // 2]} if self.rewards else {}
        return {"eval/x": float(done), **held_out}

    def workers(self):
        return [{"role": "rollout worker 0", "node": "here", "pid": 7, "state": "idle"}]


def ran(folder, script, *, save_every=1, interrupted=None, rewards=(), **best):
    """The job after the script: driven to its end, or to the exception that is raised."""
    job = ScriptedJob(script, interrupted, rewards)
    sections = {"run": {"save_every": save_every, "trackers": []}, "train": {"max_bad_steps": 2}}
    sections["eval"] = {"data": "some", "every": 2, **best}
    with open_run(folder, Config.model_validate(sections), fresh=False, command="train") as run:
        job.end = run_training(run, job, lambda done, *_: job.shown.append(done))
    return job


def killed(folder, script, **settings):
    with pytest.raises(Killed):
        ran(folder, script, **settings)


def stopped(folder, script, **settings):
    with pytest.raises(UserError, match="training stops") as caught:
        ran(folder, script, **settings)
    return caught.value


def told(folder):
    return [(folder / f"{name}.jsonl").read_bytes() for name in ("metrics", "ledger")]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def test_bad_steps_in_a_row_up_to_the_limit_go_on(tmp_path):
    ran(tmp_path, ".xx.xx.")
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["step"] for row in rows if "bad/loss" in row] == [2, 3, 5, 6]


def test_one_bad_step_too_many_stops_and_names_the_checkpoint(tmp_path):
    error = stopped(tmp_path, ".xxx....")
    assert error.found == "not finite: gradient, loss"
    assert error.where == "step 4 and the 2 before it" and "(train.max_bad_steps)" in error.expected
    assert "step_000003" in error.next and checkpoints(tmp_path)[-1] == "step_000003"
    # the last one is told too
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("killed_at", [2, 3])
def test_count_of_bad_steps_survives_a_resume(killed_at, tmp_path):
    script = ".xxx...."
    killed(tmp_path, script[:killed_at] + "K" + script[killed_at + 1 :])
    assert stopped(tmp_path, script).where.startswith("step 4 ")


def test_stopped_run_started_again_stops_at_the_same_step(tmp_path):
    first = stopped(tmp_path, "..x.xxx..", save_every=2)
    rows = told(tmp_path)
    again = stopped(tmp_path, "..x.xxx..", save_every=2)
    assert (first.where, first.next) == (again.where, again.next) and rows == told(tmp_path)
    ran(tmp_path, "..x.xx...", save_every=2)  # whatever was mended outside of the config


def test_state_of_a_step_comes_back_with_the_checkpoint(tmp_path):
    whole = ran(tmp_path / "whole", "..x..", save_every=2)
    killed(tmp_path / "killed", "..xK.", save_every=2)
    again = ran(tmp_path / "killed", "..x..", save_every=2)
    assert again.restored == (2, {"memory": ["good 0", "good 1"]}) and again.memory == whole.memory
    assert (again.shown, again.published, again.evaluated) == ([3, 4, 5], [2], [4, 5])
    weights = [next(iter(job.learner.model.trainable().values())) for job in (again, whole)]
    assert torch.equal(*weights)
    assert told(tmp_path / "killed") == told(tmp_path / "whole")


def test_evaluation_is_before_first_step_when_due_and_at_end(tmp_path):
    assert ran(tmp_path, ".....").evaluated == [0, 2, 4, 5]
    assert [row["step"] for row in read_metrics(tmp_path) if "eval/x" in row] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("script", "interrupted"),
    [("...^..", None), (".x....", 0), (".x....", 2), (".x....", 6)],
    ids=str,
)
def test_ctrl_c_saves_the_last_step_and_the_run_resumes_from_it(script, interrupted, tmp_path):
    whole = ran(tmp_path / "whole", script.replace("^", "."), save_every=100)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path / "run", script, save_every=100, interrupted=interrupted)
    done = script.index("^") if interrupted is None else interrupted
    assert checkpoints(tmp_path / "run") == [f"step_{done:06d}"] * bool(done)
    again = ran(tmp_path / "run", script.replace("^", "."), save_every=100)
    assert told(tmp_path / "run") == told(tmp_path / "whole") and again.memory == whole.memory


def kept(folder, step):
    """A row of the ledger is the hash of this file's bytes, as of episodes that a step had."""
    (folder / "episodes").mkdir(exist_ok=True)
    path = folder / "episodes" / f"train_step_{step:06d}.parquet"
    path.write_bytes(b"episodes")
    change_ledger(folder, step, episodes=file_hash(path))
    return path


def change_ledger(folder, step, **fields):
    rows = read_metrics(folder, "ledger.jsonl")
    rows[step] |= fields
    (folder / "ledger.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_resume_refuses_changed_episodes_and_reports_missing(tmp_path):
    killed(tmp_path, "...K..")
    path = kept(tmp_path, 2)
    path.write_bytes(b"Episodes")
    name = "episodes/train_step_000002.parquet"
    with pytest.raises(UserError, match=f"(?s)not as it was written.*{name}"):
        ran(tmp_path, "......")
    path.unlink()
    assert ran(tmp_path, "......").memory[-1] == "good 5"
    gone = f"no longer there, of steps before the checkpoint: {name}"
    assert gone in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("episodes/train_step_000004.parquet", "episodes", "Episodes"),
        ("episodes/train_step_000005.parquet", "episodes", "Episodes"),
        ("metrics.jsonl", '"step": 4, "reward": 1.0', '"step": 4, "reward": 0.0'),
        ("ledger.jsonl", '{"step": 4', '{"step": 9'),
    ],
)
def test_resume_refuses_what_was_changed_after_its_checkpoint(name, old, new, tmp_path):
    killed(tmp_path, ".....K..", save_every=3)
    kept(tmp_path, 4), kept(tmp_path, 5)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    what = f"the row of step 4 in {name}" if "json" in name else name
    with pytest.raises(UserError, match=f"(?s)not as it was written.*{what}"):
        ran(tmp_path, "........", save_every=3)


def test_resume_takes_what_a_kill_leaves_after_its_checkpoint(tmp_path):
    killed(tmp_path, ".....K..", save_every=3)
    kept(tmp_path, 4).unlink()  # as one of another mesh: its step is made again
    metrics = tmp_path / "metrics.jsonl"  # a row of the ledger is written before that of metrics
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert ran(tmp_path, "........", save_every=3).restored[0] == 3


def test_resume_refuses_another_hash_of_the_weights_that_it_loads(tmp_path):
    killed(tmp_path, "...K..")
    ledger = tmp_path / "ledger.jsonl"
    text = ledger.read_text()
    change_ledger(tmp_path, 3, weights=64 * "0")
    with pytest.raises(UserError, match=r"the row of step 3 in ledger\.jsonl has weights 0000"):
        ran(tmp_path, "......")
    ledger.write_text(text)
    assert ran(tmp_path, "......").restored[0] == 3


# ---- eval.keep_best and eval.patience

REWARDS = [0.5, 0.4, 0.7, 0.6, 0.7, 0.2, 0.9]  # after 0, 2, 4 ... steps
WATCHED = {"rewards": REWARDS, "keep_best": True, "patience": 3, "save_every": 3}


def kept_files(folder):
    """The bytes of all that such a run keeps, but for times."""
    files = [folder / name for name in ("metrics.jsonl", "ledger.jsonl", "best.json")]
    files += (folder / "checkpoints").glob("step_*/*.safetensors")
    files += (folder / "checkpoints").glob("step_*/state.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def test_best_checkpoint_is_kept_and_the_run_stops_without_a_better_one(tmp_path):
    job = ran(tmp_path, "." * 12, **WATCHED)
    assert (job.end.step, job.evaluated) == (10, [0, 2, 4, 6, 8, 10])
    assert job.end.best == Best(step=4, reward=0.7, misses=3) == read_best(tmp_path)
    # beside the newest two, of steps 9 and 10; 4 is no multiple of run.save_every
    assert checkpoints(tmp_path) == ["step_000004", "step_000009", "step_000010"]
    status = read_status(tmp_path)
    assert status["step"] == status["steps"] == 10


@pytest.mark.parametrize("killed_at", range(12))
def test_early_stop_after_a_kill_leaves_the_bytes_of_a_run_never_killed(killed_at, tmp_path):
    ran(tmp_path / "whole", "." * 12, **WATCHED)
    with suppress(Killed):  # the run is over before a kill at 10
        ran(tmp_path / "killed", "." * killed_at + "K" + "." * (11 - killed_at), **WATCHED)
    assert ran(tmp_path / "killed", "." * 12, **WATCHED).end.step == 10
    assert kept_files(tmp_path / "killed") == kept_files(tmp_path / "whole")


def test_stopped_run_started_again_stays_stopped_until_it_may_go_on(tmp_path):
    ran(tmp_path, "." * 12, **WATCHED)
    again = ran(tmp_path, "." * 12, **WATCHED)
    assert (again.end.step, again.published, again.evaluated) == (10, [], [])
    more = ran(tmp_path, "." * 12, **WATCHED | {"patience": 4})
    assert (more.end.step, more.evaluated) == (12, [12])
    assert more.end.best == Best(step=12, reward=0.9, misses=0)
    assert checkpoints(tmp_path) == ["step_000010", "step_000012"]


def test_weights_are_published_for_an_evaluation_that_is_due_though_patience_is_out(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path, "." * 12, interrupted=8, **WATCHED | {"patience": 9})
    again = ran(tmp_path, "." * 12, **WATCHED | {"patience": 1})
    assert (again.published, again.evaluated, again.end.step) == ([8], [8], 8)
