"""Tandem's formulas beside TRL's own code, on the same numbers: equal where they are the same
thing. An occasional check by hand: what the formulas are is held by tests/rl.

    pip install -c constraints.txt trl datasets
    python benchmarks/peers.py

Losses are read off TRL's trainers by calling their methods on objects that hold only the attributes
which those methods read; advantages and engine corrections by a GRPOTrainer over a random tiny
model. A difference that is meant is named in the docstring of the test that shows it. Left out, as
TRL 1.16 has no such thing: GAE and value losses (its PPO trainer is gone), REINFORCE++, max@k, dual
clip, decoupled PPO.
"""

import math
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.rewards import get_soft_overlong_punishment

from tandem.model.kernels import CPU
from tandem.model.logprobs import Head, token_logprobs
from tandem.model.tiny import make_tiny
from tandem.plugins.distill.divergences import divergence, sampled_advantages
from tandem.plugins.offline.pair_losses import bradley_terry, dpo, ipo, margins
from tandem.rl.advantages import centred, grpo, rloo
from tandem.rl.corrections import correction
from tandem.rl.filters import overlong_penalty
from tandem.rl.losses import (
    cispo,
    gspo,
    kl_estimate,
    off_policy_mask,
    ppo_clip,
    reinforce,
    sequence_sums,
    sequence_weights,
)
from tandem.runtime import numerics
from tandem.types import SamplingDistribution

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:You are (using 'rollout_func'|importing from 'trl.experimental')"
    ),
]

numerics.prepare()
LENGTHS = [1, 9, 4, 2, 9, 6]
SEQUENCES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
LOW, HIGH = 0.2, 0.28
MAX_TOKENS = 12
RNG = np.random.default_rng(0)
PROXIMAL = torch.from_numpy(RNG.uniform(-4, 0, len(SEQUENCES)))
POLICY = PROXIMAL + torch.from_numpy(
    RNG.normal(0, 0.4, len(SEQUENCES)) + RNG.normal(0, 0.3, len(LENGTHS))[SEQUENCES]
)
REFERENCE = POLICY + torch.from_numpy(RNG.normal(0, 0.5, len(SEQUENCES)))
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.0, -0.3], dtype=torch.float64)
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]  # [B, 9], TRL's padding


class OneProcess:
    """The parts of an accelerator that a trainer uses, for one process."""

    num_processes, process_index, device = 1, 0, torch.device("cpu")

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor


def padded(flat, fill=0.0):
    table = torch.full(MASK.shape, fill, dtype=flat.dtype)
    table[MASK] = flat
    return table


def trainer(**attributes):
    """Return an object with the attributes that the methods read besides the settings of their
    formula."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **attributes,
    )


def completions(policy, advantages, **columns):
    """A batch in TRL's layout: one prompt token, completions padded to the right; and the model's
    answer about it."""
    ids = torch.ones(MASK.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": advantages,
        "num_items_in_batch": MASK.sum(),
        **columns,
    }
    return inputs, lambda *args, **kwargs: (
        padded(policy, fill=-1.0),
        torch.zeros(MASK.shape),
        None,
    )


def trl_grpo(
    policy, loss_type, *, level="token", beta=0.0, high=HIGH, delta=None, ratio=None, old=PROXIMAL
):
    """(loss, metrics) of GRPOTrainer for one update of one microbatch; old log-probs None: on
    policy."""
    columns = {"old_per_token_logps": padded(old)} if old is not None else {}
    columns |= {"ref_per_token_logps": padded(REFERENCE)} if beta else {}
    columns |= {"importance_sampling_ratio": ratio} if ratio is not None else {}
    inputs, logprobs = completions(policy, ADVANTAGES, **columns)
    args = SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1)
    self = trainer(
        args=args,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=LOW,
        epsilon_high=high,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=logprobs,
    )
    loss = trl.GRPOTrainer._compute_loss(self, None, inputs)
    return loss, {name: values[0] for name, values in self._metrics["train"].items()}


def ours(terms, aggregation):
    weights = torch.from_numpy(sequence_weights(aggregation, np.array(LENGTHS), MAX_TOKENS))[
        SEQUENCES
    ]
    return (weights * terms).sum()


def same(loss, other):
    """The value and the gradient of two functions of the log-probs."""
    found, expected = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
    value, other_value = loss(found), other(expected)
    value.backward()
    other_value.backward()
    torch.testing.assert_close(value, other_value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


# --- policy losses

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "fixed_length",
}


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_clipped_loss_and_gradient_are_trls(loss_type):
    """TRL's bnpo divides by the tokens of a microbatch and dapo by those of the update, of which
    Tandem has only the second; here both are one microbatch. dr_grpo divides by the configured
    length in both."""
    same(
        lambda p: ours(
            ppo_clip(p, PROXIMAL, ADVANTAGES[SEQUENCES], clip_low=LOW, clip_high=HIGH)[0],
            AGGREGATIONS[loss_type],
        ),
        lambda p: trl_grpo(p, loss_type)[0],
    )


def test_share_of_clipped_tokens_is_trls():
    """TRL's is a mean and split by side; Tandem's a sum over tokens. Both leave out tokens with
    advantage 0."""
    _, metrics = ppo_clip(POLICY, PROXIMAL, ADVANTAGES[SEQUENCES], clip_low=LOW, clip_high=HIGH)
    _, theirs = trl_grpo(POLICY, "dapo")
    assert metrics["clip_share"] / len(SEQUENCES) == pytest.approx(
        theirs["clip_ratio/region_mean"], rel=1e-6
    )
    assert metrics["clip_share"] > 0


def test_loss_and_gradient_on_policy_are_trls():
    same(
        lambda p: ours(
            ppo_clip(p, p.detach(), ADVANTAGES[SEQUENCES], clip_low=LOW, clip_high=HIGH)[0],
            "token_mean",
        ),
        lambda p: trl_grpo(p, "dapo", old=None)[0],
    )


def test_two_sided_clip_is_trls_delta():
    same(
        lambda p: ours(
            ppo_clip(
                p - 1.5,
                PROXIMAL,
                ADVANTAGES[SEQUENCES],
                clip_low=LOW,
                clip_high=HIGH,
                dual_clip=1.4,
            )[0],
            "token_mean",
        ),
        lambda p: trl_grpo(p - 1.5, "dapo", delta=1.4)[0],
    )


def test_off_policy_sequence_mask_is_trls():
    threshold = 0.05
    found = off_policy_mask(POLICY, PROXIMAL, ADVANTAGES[SEQUENCES], SEQUENCES, most=threshold)
    theirs = trl.GRPOTrainer.get_off_policy_mask(
        ADVANTAGES[:, None], padded(POLICY), padded(PROXIMAL), MASK.double(), threshold
    )
    assert found.tolist() == theirs[:, 0][SEQUENCES].tolist() and 0 < found.sum() < len(found)


def test_sequence_loss_and_gradient_are_trls():
    """TRL keeps one ratio a sequence, Tandem repeats it for each token; the sequence mean makes
    them equal."""
    same(
        lambda p: ours(
            gspo(p, PROXIMAL, ADVANTAGES[SEQUENCES], SEQUENCES, clip_low=LOW, clip_high=HIGH)[0],
            "sequence_mean",
        ),
        lambda p: trl_grpo(p, "grpo", level="sequence")[0],
    )


def test_clip_share_of_sequences_weighs_tokens_unlike_trls():
    """Deliberate: Tandem's metrics are sums over tokens for every loss."""
    _, metrics = gspo(
        POLICY, PROXIMAL, ADVANTAGES[SEQUENCES], SEQUENCES, clip_low=LOW, clip_high=HIGH
    )
    _, theirs = trl_grpo(POLICY, "grpo", level="sequence")
    ratio = sequence_sums(POLICY - PROXIMAL, SEQUENCES).div(torch.tensor(LENGTHS)).exp()
    clipped = ((ratio > 1 + HIGH) & (ADVANTAGES > 0)) | ((ratio < 1 - LOW) & (ADVANTAGES < 0))
    assert 0 < clipped.sum() < len(LENGTHS)
    assert metrics["clip_share"] == (clipped * torch.tensor(LENGTHS)).sum()
    assert theirs["clip_ratio/region_mean"] == pytest.approx(
        clipped.float().mean().item(), rel=1e-6
    )


def test_cispo_without_lower_bound_is_trls():
    """Deliberate: TRL's epsilon_high is the bound itself and it has no lower one; Tandem's bounds
    are the paper's 1 - clip_low and 1 + clip_high (eq. 5)."""
    same(
        lambda p: ours(
            cispo(p, PROXIMAL, ADVANTAGES[SEQUENCES], clip_low=1.0, clip_high=HIGH)[0], "token_mean"
        ),
        lambda p: trl_grpo(p, "cispo", high=1 + HIGH)[0],
    )
    bounded, free = (
        cispo(POLICY, PROXIMAL, ADVANTAGES[SEQUENCES], clip_low=c, clip_high=HIGH)[0]
        for c in (LOW, 1.0)
    )
    below = (POLICY - PROXIMAL).exp() < 1 - LOW
    assert torch.equal(bounded != free, below & (ADVANTAGES[SEQUENCES] != 0))


def test_dual_clip_beyond_the_upper_clip_is_trls_delta():
    """Deliberate: TRL's delta (INTELLECT-2) clamps the ratio before the minimum, for either sign of
    the advantage; dual clip bounds the objective where A < 0 and nothing else."""
    old, advantages = PROXIMAL - 1.0, ADVANTAGES[SEQUENCES]  # ratios e times as large

    def dual(policy, bound):
        terms, _ = ppo_clip(policy, old, advantages, clip_low=LOW, clip_high=HIGH, dual_clip=bound)
        return ours(terms, "token_mean")

    same(lambda p: dual(p, 2.5), lambda p: trl_grpo(p, "dapo", delta=2.5, old=old)[0])
    assert ((POLICY - old).exp()[advantages < 0] > 2.5).any()
    assert abs(dual(POLICY, 1.1) - trl_grpo(POLICY, "dapo", delta=1.1, old=old)[0]) > 0.01


def test_kl_penalty_is_trls():
    same(
        lambda p: ours(kl_estimate("k3", p, REFERENCE), "token_mean") * 0.1,
        lambda p: trl_grpo(p, "dapo", beta=0.1)[0] - trl_grpo(p, "dapo")[0],
    )
    mean = trl_grpo(POLICY, "dapo", beta=0.1)[1]["kl"]
    assert kl_estimate("k3", POLICY, REFERENCE).mean().item() == pytest.approx(mean, rel=1e-12)


def test_correction_multiplies_the_loss_of_a_token_as_in_trl():
    ratio = (PROXIMAL - REFERENCE).exp()
    same(
        lambda p: ours(
            ratio * ppo_clip(p, PROXIMAL, ADVANTAGES[SEQUENCES], clip_low=LOW, clip_high=HIGH)[0],
            "sequence_mean",
        ),
        lambda p: trl_grpo(p, "grpo", ratio=padded(ratio))[0],
    )


def trl_rloo(policy, old):
    inputs, logprobs = completions(policy, ADVANTAGES, old_logps=sequence_sums(old, SEQUENCES))
    self = trainer(epsilon_low=LOW, epsilon_high=HIGH, _get_per_token_logps_and_entropies=logprobs)
    return trl.RLOOTrainer._compute_loss(self, None, inputs)


def test_reinforce_has_the_gradient_of_trls_rloo_on_policy():
    """Deliberate: TRL's RLOO clips the ratio of the whole sequence, a product over tokens; Tandem's
    is the paper's -A log p, for the first update. The values differ (-A against -A log p), the
    gradients do not."""
    found, expected = POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()
    (ours(reinforce(found, ADVANTAGES[SEQUENCES])[0], "fixed_length") * MAX_TOKENS).backward()
    trl_rloo(expected, POLICY).backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_trls_rloo_is_the_token_clip_for_one_token_only():
    one = torch.zeros(len(SEQUENCES), dtype=torch.bool)
    # policy and old agree but for the last token of each
    one[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    policy = torch.where(one, POLICY, PROXIMAL)
    clipped = ppo_clip(policy[one], PROXIMAL[one], ADVANTAGES, clip_low=LOW, clip_high=HIGH)[
        0
    ].mean()
    torch.testing.assert_close(clipped, trl_rloo(policy, PROXIMAL), rtol=1e-12, atol=1e-14)
    sequence_clip = gspo(
        POLICY, PROXIMAL, ADVANTAGES[SEQUENCES], SEQUENCES, clip_low=LOW, clip_high=HIGH
    )[0]
    # a mean against a sum
    assert abs(ours(sequence_clip, "sequence_mean") - trl_rloo(POLICY, PROXIMAL)) > 0.01


# --- log-probs, entropy, distillation


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_and_entropy_are_trls(temperature):
    """In float32: Tandem's log_softmax and TRL's logsumexp round differently. TRL's top-p, top-k
    and min-p never reach its log-probs (#6789), so no filter is compared."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = torch.from_numpy(RNG.normal(0, 3, (30, 50))).float()
    targets, head = torch.from_numpy(RNG.integers(0, 50, 30)), torch.eye(50)
    logprobs, entropy = token_logprobs(
        Head(logits, head, CPU.pack(head)), targets, SamplingDistribution(temperature=temperature)
    )
    torch.testing.assert_close(
        logprobs, selective_log_softmax(logits, targets, temperature=temperature)
    )
    torch.testing.assert_close(
        entropy, entropy_from_logits(logits / temperature), rtol=1e-5, atol=1e-5
    )


def test_distillation_of_sampled_tokens_has_trls_gradient():
    """TRL's loss is (student - teacher) log p with the bracket held: -A log p with Tandem's
    advantages."""
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss
    from trl.trainer.utils import selective_log_softmax

    student, teacher = (torch.from_numpy(RNG.normal(0, 2, (2, 7, 11))) for _ in range(2))
    ids = torch.from_numpy(RNG.integers(0, 11, (2, 7)))
    policy = selective_log_softmax(student, ids).reshape(-1)
    advantages = sampled_advantages(policy, selective_log_softmax(teacher, ids).reshape(-1))
    theirs = compute_sampled_token_self_distillation_loss(
        student, teacher, ids, distillation_alpha=1.0
    )
    torch.testing.assert_close(
        reinforce(policy, advantages)[0], theirs.reshape(-1), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    ("kind", "beta"), [("forward_kl", 0.0), ("jsd", 0.3), ("jsd", 0.5), ("reverse_kl", 1.0)]
)
def test_divergences_from_a_teacher_are_trls(kind, beta):
    """TRL's beta of 0 and 1 are the two directions of KL."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher = (torch.from_numpy(RNG.normal(0, 2, (2, 7, 11))) for _ in range(2))
    own, held = (table.log_softmax(-1).view(-1, 11) for table in (student, teacher))
    theirs = (
        GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="none")
        .sum(-1)
        .view(-1)
    )
    torch.testing.assert_close(
        divergence(kind, own, held, beta=beta, top_k=0)[0], theirs, rtol=1e-10, atol=1e-12
    )


# --- pairs

CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED = torch.from_numpy(
    RNG.normal(-6, 3, (4, 5))
).unbind(0)
COUNTS = torch.tensor([3, 1, 4, 2, 5])


def trl_dpo(loss_type, rows=slice(None), beta=0.3, smoothing=0.0):
    """DPOTrainer's loss and metrics of pairs whose answers have COUNTS tokens, the first carrying
    the whole log-prob."""
    chosen, rejected = CHOSEN[rows], REJECTED[rows]
    counts = COUNTS[rows].repeat(2)
    mask = (torch.arange(1 + int(COUNTS.max())) >= 1) & (
        torch.arange(1 + int(COUNTS.max())) <= counts[:, None]
    )
    logprobs = torch.zeros(len(counts), mask.shape[1] - 1, dtype=torch.float64)
    logprobs[:, 0] = torch.cat([chosen, rejected])
    nothing = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(
        log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    inputs = {
        "input_ids": mask.long(),
        "attention_mask": mask.long(),
        "completion_mask": mask.long(),
        "ref_chosen_logps": REFERENCE_CHOSEN[rows],
        "ref_rejected_logps": REFERENCE_REJECTED[rows],
    }
    self = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = trl.DPOTrainer._compute_loss(self, lambda **_: outputs, inputs, False)
    return loss.item(), {
        name: values[0] for name, values in self._metrics["train"].items() if values
    }


def test_dpo_and_its_metrics_are_trls():
    """The loss is a mean in TRL and a sum of pairs in Tandem's metrics."""
    losses, metrics = dpo(margins(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED), beta=0.3)
    theirs, logged = trl_dpo("sigmoid")
    assert losses.mean().item() == pytest.approx(theirs, rel=1e-12)
    assert metrics["accuracy"] / 5 == pytest.approx(logged["rewards/accuracies"], rel=1e-6)
    assert metrics["margin"] / 5 == pytest.approx(logged["rewards/margins"], rel=1e-12)


def test_label_smoothing_is_trls_where_trl_has_it():
    """Deliberate: with loss_type sigmoid TRL 1.16 ignores label_smoothing; its `robust` is another
    loss, unbiased under flipped labels, where Tandem has cDPO. TRL's `aot` is cDPO of sorted
    margins: of one pair at a time, cDPO itself."""
    margin = margins(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
    losses, _ = dpo(margin, beta=0.3, label_smoothing=0.1)
    theirs = [trl_dpo("aot", slice(i, i + 1), smoothing=0.1)[0] for i in range(5)]
    assert losses.tolist() == pytest.approx(theirs, rel=1e-12)
    assert trl_dpo("sigmoid", smoothing=0.1)[0] == trl_dpo("sigmoid")[0]
    right_way, wrong_way = (dpo(s * margin, beta=0.3)[0] for s in (1, -1))
    robust = (0.9 * right_way - 0.1 * wrong_way) / 0.8
    assert robust.mean().item() == pytest.approx(trl_dpo("robust", smoothing=0.1)[0], rel=1e-12)


@pytest.mark.parametrize(("loss_type", "loss"), [("ipo", ipo), ("sigmoid_norm", dpo)])
def test_losses_of_mean_logprobs_are_trls(loss_type, loss):
    """TRL divides by the answers' tokens inside; Tandem's functions take sums or means, and IPO's
    default is means too."""
    means = [x / COUNTS for x in (CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)]
    assert loss(margins(*means), beta=0.3)[0].mean().item() == pytest.approx(
        trl_dpo(loss_type)[0], rel=1e-12
    )


def test_reward_model_loss_and_metrics_are_trls():
    """TRL can add a margin and a penalty on the scores' size; Tandem has neither."""
    scores = torch.cat([CHOSEN, REJECTED])[:, None]
    self = trainer(
        args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1
    )
    theirs = trl.RewardTrainer.compute_loss(
        self, lambda **_: SimpleNamespace(logits=scores), {"attention_mask": torch.ones(10, 3)}
    )
    losses, metrics = bradley_terry(CHOSEN, REJECTED)
    logged = self._metrics["train"]
    assert losses.mean().item() == pytest.approx(theirs.item(), rel=1e-12)
    assert metrics["accuracy"] / 5 == pytest.approx(logged["accuracy"][0], rel=1e-6)
    assert metrics["margin"] / 5 == pytest.approx(logged["margin"][0], rel=1e-12)


# --- rewards


@pytest.mark.parametrize(("limit", "buffer"), [(100, 20), (100, 100), (10, 3), (7, 1)])
def test_overlong_penalty_is_trls_with_the_other_sign(limit, buffer):
    """A penalty is positive here and is subtracted by whoever scores."""
    lengths = range(2 * limit)
    theirs = get_soft_overlong_punishment(limit, buffer)([[0] * n for n in lengths])
    assert [-overlong_penalty(n, limit, buffer) for n in lengths] == pytest.approx(
        theirs, rel=1e-15
    )


def test_length_costs_nothing_without_a_buffer():
    """Deliberate: TRL penalizes what is longer than the limit, and nothing can be; here
    `rollout.score` knows what was truncated."""
    theirs = get_soft_overlong_punishment(10, 0)([[0] * n for n in (9, 10, 11)])
    assert (theirs, [overlong_penalty(n, 10, 0) for n in (9, 10, 11)]) == ([0, 0, -1], [0, 0, 0])


# --- advantages and engine corrections, through trainers over a tiny model

PROMPTS, GROUP = 3, 4
REWARDS = np.array([*RNG.normal(size=(PROMPTS - 1, GROUP)), [0.25] * GROUP])
ENGINE_NOISE = RNG.normal(0, 0.7, 200)


def canned_rollout(prompts, trainer):
    """Completions of 1 to 5 random tokens with made-up engine log-probs: the model is random, so
    both are near -5."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(10, 90, 1 + i % 5).tolist() for i in range(len(prompts))]
    noise = iter(ENGINE_NOISE)
    return {
        "prompt_ids": [[10, 11]] * len(prompts),
        "completion_ids": ids,
        "logprobs": [[-5.0 + next(noise) for _ in row] for row in ids],
    }


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """A GRPOTrainer and an RLOOTrainer over one tiny random model, whose rewards are REWARDS."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, hidden=32, layers=1, intermediate=48)
    shared = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 5,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "activation_checkpointing": False,
        "disable_tqdm": True,
        "beta": 0.0,
    }

    def build(kind, config, **more):
        return kind(
            model=AutoModelForCausalLM.from_pretrained(folder),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=lambda completions, **_: REWARDS.reshape(-1).tolist(),
            args=config(**shared),
            train_dataset=Dataset.from_list([{"prompt": "1+1"}] * PROMPTS),
            **more,
        )

    return SimpleNamespace(
        grpo=build(trl.GRPOTrainer, trl.GRPOConfig, rollout_func=canned_rollout),
        rloo=build(trl.RLOOTrainer, trl.RLOOConfig),
    )


def scored(trainer):
    return trainer._generate_and_score_completions([{"prompt": "1+1"}] * (PROMPTS * GROUP))


def bessel(size):
    """std with one less in the denominator, over std."""
    return math.sqrt(size / (size - 1))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls_up_to_std_and_epsilon(trainers, scale):
    """Deliberate: TRL's std has G - 1 in the denominator (Tandem's G, as the paper's), its epsilon
    is 1e-4 (1e-6), it computes in float32, and its `batch` scale is the std of rewards where
    REINFORCE++-baseline has that of centred ones."""
    trainers.grpo.scale_rewards = scale
    theirs = scored(trainers.grpo)["advantages"].view(PROMPTS, GROUP).numpy()
    expected = {
        "none": centred(REWARDS),
        "group": centred(REWARDS) / (REWARDS.std(1, keepdims=True) * bessel(GROUP) + 1e-4),
        "batch": centred(REWARDS) / (REWARDS.std() * bessel(REWARDS.size) + 1e-4),
    }[scale]
    np.testing.assert_allclose(theirs, expected, rtol=2e-6, atol=1e-6)
    if scale == "group":
        # what epsilon leaves
        np.testing.assert_allclose(grpo(REWARDS)[:2], theirs[:2] * bessel(GROUP), rtol=3e-4)
        assert np.abs(grpo(REWARDS)[:2] / theirs[:2]).min() > 1.15


def test_rloo_advantages_are_trls(trainers):
    """TRL can whiten them over the batch (normalize_advantages, off by default); Tandem's stay as
    the paper has them."""
    theirs = scored(trainers.rloo)["advantages"].view(PROMPTS, GROUP).numpy()
    np.testing.assert_allclose(theirs, rloo(REWARDS), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("decoupled", "token_truncate"),
        ("tis", "token_truncate"),
        ("tis_sequence", "sequence_truncate"),
        ("icepop", "token_mask"),
        ("mis", "sequence_mask"),
    ],
)
def test_engine_corrections_are_trls(trainers, kind, mode):
    """TRL keeps padding (its ratio there is exactly 1, and the loss mask drops it) and one number a
    sequence, where Tandem has one for each loss token. Tandem has no lower bound but icepop's;
    `decoupled` is TRL without bounds."""
    low, cap = 0.6, 1.5
    top = trainers.grpo
    top.use_vllm, top._last_loaded_step, top.vllm_importance_sampling_correction = (
        True,
        top.state.global_step,
        True,
    )
    top.vllm_importance_sampling_mode = mode
    top.vllm_importance_sampling_clip_max = None if kind == "decoupled" else cap
    top.vllm_importance_sampling_clip_min = {"icepop": low, "decoupled": 0.0}.get(kind)
    batch = scored(top)
    top.use_vllm = False
    mask = batch["completion_mask"].bool()
    sequences = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
    proximal, engine = batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask]
    found = correction(kind, proximal, engine, sequences, low=low, cap=cap)
    theirs = batch["importance_sampling_ratio"].expand(mask.shape)[mask]
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)
    plain = correction("decoupled", proximal, engine, sequences, low=low, cap=cap)
    assert (
        (plain > cap).any()
        and (plain < low).any()
        and not torch.equal(found, torch.ones_like(found))
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
