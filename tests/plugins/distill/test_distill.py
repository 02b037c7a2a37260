"""Distillation against whole logits of stock student and teacher: the exact KL, and its estimate by
the sampled tokens."""

import pytest
import torch

from tandem.config.schema import Config, Distill
from tandem.plugins.distill.update import distill
from tandem.runtime.errors import UserError
from tandem.trainer.batch import Models
from tests.support import dense
from tests.support.episodes import (
    MAX_NEW_TOKENS,
    SAMPLING,
    bits,
    engine_of,
    episodes_of,
    learn_stage,
    perturbed,
    recorded,
    sampled_groups,
    settings,
    trained,
)
from tests.support.tiny import exact_model, twins


def config_of(estimator, budget=60, distill={}, **rl):  # noqa: B006 - it is not changed
    plain = settings(budget, **rl)
    return Config(
        rl=plain.rl,
        train=plain.train,
        rollout=plain.rollout,
        distill=Distill(estimator=estimator, **distill),
    )


def distilled(student, teacher, groups, config, version=0):
    """The metrics of a step of the learner."""
    return distill(learn_stage(Models(policy=student, teacher=teacher), config), groups, version)


def once(student, teacher, groups, config):
    """(metrics, gradients of each update) of a step that changes nothing."""
    learner = recorded(student)
    return distilled(learner, teacher, groups, config), learner.optimizer.updates


def dense_kl(stock, stock_teacher, episode):
    """At each sampled position, over the vocabulary."""
    rows = torch.from_numpy(episode.loss_mask).nonzero()[:, 0] - 1
    own = dense.table(stock, episode.tokens, SAMPLING.temperature)[rows]
    gap = own - dense.table(stock_teacher, episode.tokens, SAMPLING.temperature)[rows].detach()
    return (own.exp() * gap).sum(-1)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_exact_estimator_is_the_kl_over_whole_logits(aggregation):
    (student, stock), (teacher, stock_teacher) = twins("qwen3"), twins("qwen3", seed=5)
    groups = sampled_groups(student, turns=2)
    row, [gradients] = once(student, teacher, groups, config_of("exact", aggregation=aggregation))
    terms = [dense_kl(stock, stock_teacher, episode) for episode in episodes_of(groups)]
    dense.aggregate(aggregation, terms, MAX_NEW_TOKENS).backward()
    dense.assert_gradients(gradients, stock)
    assert row["teacher_kl"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-5)
    assert row["num_loss_tokens"] == sum(e.loss_mask.sum() for e in episodes_of(groups))


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_other_divergence_falls_and_is_not_the_reverse_kl(kind, top_k):
    student, teacher = trained(exact_model("qwen3")), exact_model("qwen3", seed=5)
    groups = sampled_groups(student.model)
    config = config_of("exact", distill={"divergence": kind, "top_k": top_k})
    reverse, _ = once(exact_model("qwen3"), teacher, groups, config_of("exact"))
    found = [distilled(student, teacher, groups, config)["teacher_kl"] for _ in range(10)]
    assert found[0] != pytest.approx(reverse["teacher_kl"], rel=1e-3)
    assert found[-1] < 0.8 * found[0]


def test_sampled_estimator_weighs_tokens_by_the_teachers_logprob():
    (student, stock), (teacher, stock_teacher) = twins("qwen3"), twins("qwen3", seed=5)
    groups = sampled_groups(student, turns=2)
    config = config_of("sampled", aggregation="token_mean")
    row, [gradients] = once(student, teacher, groups, config)
    terms, kl = [], []
    for episode in episodes_of(groups):
        own, held = (
            dense.logprobs(m, episode.tokens, episode.loss_mask, SAMPLING.temperature)
            for m in (stock, stock_teacher)
        )
        kl.append((own - held).detach())
        terms.append(dense.policy_terms(config.rl, own, engine_of(episode), -kl[-1]))
    dense.aggregate("token_mean", terms, MAX_NEW_TOKENS).backward()
    dense.assert_gradients(gradients, stock)
    assert row["teacher_kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
    assert row["logprob_gap"] == 0.0 and row["ratio"] == 1.0


def test_engine_not_the_students_raises_before_a_weight_changes():
    student = trained(exact_model("qwen3"))
    before = bits(student)
    groups = perturbed(sampled_groups(student.model), 1e-4)
    with pytest.raises(UserError, match="engine and policy do not agree"):
        distilled(student, exact_model("qwen3", seed=5), groups, config_of("sampled"))
    assert bits(student) == before
