"""What a package of anybody's adds by its entry points: it is written into a temporary folder, as
pip would leave it, and a run takes it by its name."""

import sys

import pytest

from tandem import registry
from tandem.config.recipe import load_config
from tandem.rl.algorithms import policy_loss
from tandem.train.batch import Models
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
    sys.modules.pop("steep_loss", None)


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
