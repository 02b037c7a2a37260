"""The gap to a rollout engine of other kernels: measured before an update, with a bound that stops
the run; what such an engine sampled is read back from the journal."""

import math

import pytest
import torch

from tandem.choices import why_gap
from tandem.config.schema import RL, Config, Rollout
from tandem.jobs.exactness import require_correction, require_parity
from tandem.model.load import make_exact
from tandem.model.probe import Exactness
from tandem.runtime.errors import UserError
from tandem.trainer.batch import Models
from tandem.trainer.parallel.ranks import ParallelRanks
from tests.support.episodes import MAX_NEW_TOKENS, bits, learn, perturbed, sampled_groups, trained
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model, stock_model, tiny_config
from tests.support.updates import learner_of


def settings(**rl):
    return Config(
        rl=RL(**{"correction": "tis", **rl}),
        rollout=Rollout(max_new_tokens=MAX_NEW_TOKENS, engine="vllm", workers=1),
    )


def shifted(groups, gap):
    """The groups of an engine whose log-probs are off by so many nats."""
    return perturbed(groups, 0.0, mean=gap)


@pytest.mark.parametrize(
    ("gap", "bound", "stops"),
    [
        (1e-5, 0.0, False),
        (5e-4, 0.0, False),
        (-2e-3, 0.0, True),
        (2e-3, 1.05, False),
        (0.04, 1.05, False),
        (0.06, 1.05, True),
    ],
)
def test_a_gap_above_the_bound_stops_the_run_before_an_update(gap, bound, stops):
    """The bound is log(rl.max_logprob_error), or 1e-3 nats in float32."""
    policy = trained(exact_model("qwen3"))
    groups = shifted(sampled_groups(policy.model), gap)
    before = bits(policy)
    if stops:
        with pytest.raises(UserError, match="does not run the trainer's model") as error:
            learn(Models(policy=policy), groups, settings(max_logprob_error=bound), exact=False)
        assert "a tied head" in error.value.next and "stale weights" in error.value.next
        assert f"{abs(gap):.3g} nats in the mean" in error.value.found and bits(policy) == before
        return
    row = learn(Models(policy=policy), groups, settings(max_logprob_error=bound), exact=False)
    assert row["logprob_gap_mean"] == pytest.approx(abs(gap), rel=0.05)
    assert row["logprob_gap"] >= row["logprob_gap_mean"] and bits(policy) != before


def bfloat16_gap_on(mesh, gap):
    model = make_exact(stock_model(tiny_config("qwen3")).to(torch.bfloat16))
    groups, ranks = shifted(sampled_groups(model), gap), ParallelRanks(mesh)
    policy = learner_of(ranks.divide(model, torch.bfloat16), ranks)
    return learn(Models(policy=policy), groups, settings(), exact=False)["logprob_gap_mean"]


def test_bound_of_divided_weights_is_that_of_the_type_that_runs():
    assert on_mesh(bfloat16_gap_on, 2e-3, data=2) == [pytest.approx(2e-3, rel=0.05)] * 2


def test_tokens_of_older_weights_are_not_compared():
    policy = trained(exact_model("qwen3"))
    groups = shifted(sampled_groups(policy.model, version=2), 0.5)
    row = learn(Models(policy=policy), groups, settings(), version=3, exact=False)
    assert "logprob_gap_mean" not in row and math.isfinite(row["logprob_error_mean"])


def test_tandems_engine_has_no_mean_gap():
    policy = trained(exact_model("qwen3"))
    plain = Config(rl=RL(correction="tis"), rollout=Rollout(max_new_tokens=MAX_NEW_TOKENS))
    assert "logprob_gap_mean" not in learn(
        Models(policy=policy), sampled_groups(policy.model), plain
    )


def test_another_engine_needs_a_correction_and_is_never_exact():
    agree = Exactness(parity=[], thread_dependent=[])
    with pytest.raises(UserError, match=r"rl\.correction") as error:
        require_correction(settings(correction="none"))
    assert error.value.where == "rollout.engine = vllm"
    require_correction(settings())
    assert not require_parity(settings(), agree).exact and require_parity(Config(), agree).exact
    assert (why_gap(Config(), ""), why_gap(settings(), "")) == ("", "rollout.engine = vllm")
