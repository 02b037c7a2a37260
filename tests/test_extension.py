"""Packages of anybody's and what they add by entry points: each is written into a temporary folder,
as pip would leave it, and a run takes it by its name."""

import sys

import pytest

from tandem import registry
from tandem.cli.train import train
from tandem.config.recipe import load_config
from tandem.jobs.exactness import require_correction
from tandem.rl.algorithms import policy_loss
from tandem.run_folder.metrics import read_metrics
from tandem.trainer.batch import Models
from tests.support.command import assert_is_a_users_error, tandem
from tests.support.episodes import bits, learn, sampled_groups, settings, trained
from tests.support.tiny import exact_model


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package of one module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text, points):
        (tmp_path / f"{name}.py").write_text(text)
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(points)
        registry._foreign.cache_clear()

    yield write
    registry._foreign.cache_clear()
    for name in ("steep_loss", "slow_engine", "list_tracker", "no_command"):
        sys.modules.pop(name, None)


ALGORITHM = """
from tandem.rl.algorithms import Algorithm, PolicyLoss
from tandem.rl.losses import total


def squared(policy_logprobs, proximal_logprobs, advantages, *, clip_high):
    ratio = (policy_logprobs - proximal_logprobs).exp()
    losses = -advantages * ratio + (ratio - 1).square() / clip_high
    return losses, {"policy_loss": total(losses), "ratio": total(ratio)}


KNOWN = {"settings": ("clip_high",), "starts_at_advantage": True}
LOSS = PolicyLoss("squared", f"{__name__}:squared", **KNOWN)
SPO = Algorithm("spo", "arXiv 2401.16025", "rloo", "squared", "token_mean", {"clip_high": 0.5})
"""
POINTS = """[tandem.algorithms]
spo = steep_loss:SPO
[tandem.losses]
squared = steep_loss:LOSS
"""


def test_an_algorithm_of_a_package_trains_by_its_name(install):
    install("steep_loss", ALGORITHM, POINTS)
    rl = load_config(None, ["rl.algorithm=spo"]).rl
    assert (rl.loss, rl.advantage, rl.clip_high) == ("squared", "rloo", 0.5)
    assert policy_loss("squared").starts_at_advantage  # so its first update is checked
    with pytest.raises(registry.UserError, match=r"rl\.clip_low: has no effect with rl\.loss"):
        load_config(None, ["rl.algorithm=spo", "rl.clip_low=0.1"])
    policy = trained(exact_model("qwen3"))
    before = bits(policy)
    row = learn(Models(policy=policy), sampled_groups(policy.model), settings(algorithm="spo"))
    assert row["ratio"] == 1.0 and row["logprob_gap"] == 0.0 and bits(policy) != before


ENGINE = """
from contextlib import contextmanager

from tandem.choices import RolloutBackend


class Shifted(RolloutBackend):
    gap = "slow_engine of other kernels"

    def conflicts(self, config):
        if config.rollout.workers:
            yield "rollout.workers: shifted runs in the trainer's process"

    def parity(self, config, exact, inexact):
        from tandem.trainer.parity import MeasuredGap

        return MeasuredGap(config, self.where(config))

    @contextmanager
    def open(self, stage):
        from tandem.jobs.rollouts import Rollouts
        from tandem.weights.in_process import InlineSync

        yield Rollouts(lanes=[(stage.local, InlineSync(stage.engine))])
"""
TRACKER = """
rows = []


class ListTracker:
    def __init__(self, *about):
        pass

    def log(self, step, row):
        rows.append((step, row))

    def log_samples(self, step, samples):
        pass

    def close(self):
        rows.append("closed")
"""


def test_an_engine_of_a_package_samples_a_step(install, home, tmp_path):
    """It is one class and an entry point; the correction that other kernels need is asked for."""
    install("slow_engine", ENGINE, "[tandem.engines]\nshifted = slow_engine:Shifted\n")
    keys = ["rollout.engine=shifted", "run.steps=1", "eval.data="]
    with pytest.raises(registry.UserError, match=r"rollout\.workers: shifted runs in"):
        load_config(home / "recipe.toml", [*keys, "rollout.workers=1"])
    with pytest.raises(registry.UserError, match=r"(?s)slow_engine of other.*rl\.correction=tis"):
        require_correction(load_config(home / "recipe.toml", keys))
    config = load_config(home / "recipe.toml", [*keys, "rl.correction=tis"])
    train("train", config, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[-1]["logprob_gap_mean"] < 1e-6


def test_a_tracker_of_a_package_gets_every_row(install, home, tmp_path):
    install("list_tracker", TRACKER, "[tandem.trackers]\nlist = list_tracker:ListTracker\n")
    keys = ["run.trackers=['list']", "run.steps=1", "eval.data="]
    train("train", load_config(home / "recipe.toml", keys), tmp_path / "run")
    *rows, end = sys.modules["list_tracker"].rows
    assert [step for step, _ in rows] == [0, 1] and end == "closed"


def test_a_broken_command_of_a_package_leaves_help_to_the_others(install, tmp_path):
    install("no_command", "", "[tandem.commands]\nbroken = no_command:missing\n")
    code, stdout, _ = tandem("--help", cwd=tmp_path)
    assert code == 0 and "broken" in stdout and "its package cannot be loaded" in stdout
    assert_is_a_users_error(tandem("broken", cwd=tmp_path), "no_command", "AttributeError")
