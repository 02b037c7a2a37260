"""Context parallel passes have the bits of one process; gradients differ by the order of sums."""

from functools import partial

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs, batch_values, teacher_divergences
from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.rl.distillation import divergence
from tandem.train.pack import pack
from tandem.train.parallel.ranks import ParallelRanks
from tandem.train.ranks import ALONE
from tandem.types import SamplingDistribution
from tests.support.meshes import on_mesh
from tests.support.tiny import (
    exact_model,
    make_sample,
    random_samples,
    random_tokens,
    stock_model,
    tiny_config,
    value_twins,
)
from tests.support.updates import learner_of, updated

FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SAMPLING = SamplingDistribution(temperature=0.7, repetition_penalty=1.3)
REVERSE_KL = partial(divergence, "reverse_kl", beta=0.5, top_k=0)
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=3)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# A mesh, and the models of a pass over it: kind, changes of its config, adapter, type of weights.
CASES = [
    (
        {"context": 2},
        [
            ("qwen3", {}, None, FLOAT32),
            ("qwen3", {}, None, BFLOAT16),
            ("qwen3_moe", {}, None, FLOAT32),
        ],
    ),
    ({"context": 4}, [("qwen3", FOUR_HEADS, None, FLOAT32)]),
    (
        {"data": 2, "context": 2},
        [
            ("qwen3", {}, None, FLOAT32),
            ("mistral", {}, None, FLOAT32),
            ("qwen2", {}, LORA, FLOAT32),
        ],
    ),
    ({"context": 2, "tensor": 2}, [("qwen3", FOUR_HEADS, None, FLOAT32)]),
    ({"context": 2, "pipeline": 2}, [("mistral", {}, None, FLOAT32)]),
    ({"context": 2, "expert": 2}, [("qwen3_moe", {"num_experts": 4}, None, FLOAT32)]),
]
by_mesh = pytest.mark.parametrize(
    ("sizes", "cases"),
    CASES,
    ids=[" x ".join(f"{name} {size}" for name, size in sizes.items()) for sizes, _ in CASES],
)


def microbatches():
    """Packed groups; one sequence whose first rows predict no target; two rows, fewer than ranks,
    so that some have padding only."""
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, 90)
    lonely = [
        make_sample(tokens, np.arange(90) >= 70),
        make_sample(tokens[:3], [False, True, True]),
    ]
    return [*pack(random_samples(rng, 6), 90), *pack(lonely[:1], 90), *pack(lonely[1:], 90)]


def policy_of(kind, changes, lora, dtype):
    model = make_exact(stock_model(tiny_config(kind, **changes)), lora)
    for name, parameter in model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return cast(model, dtype)


def cast(model, dtype):
    """Give the parameters of a model another type, and buffers none, as `load_model` does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    return model


# ---- forward passes


def models(kind, changes, lora, dtype):
    """(policy, teacher, value model)"""
    teacher, critic = exact_model(kind, 1, **changes), value_twins(kind, **changes)[0]
    return policy_of(kind, changes, lora, dtype), cast(teacher, dtype), cast(critic, dtype)


def values(ranks, policy, teacher, critic, staged=False):
    """The values of all targets that passes give, by what they are. staged: without divergences,
    because a pipeline's frozen models run with a loss alone."""
    passes = {
        "logprobs": (policy, lambda b: batch_logprobs(policy, b, SAMPLING)[0]),
        "entropies": (policy, lambda b: batch_logprobs(policy, b, SAMPLING)[1]),
        "values": (critic, lambda b: batch_values(critic, b)),
        "divergences": (policy, lambda b: teacher_divergences(policy, teacher, b, 0.7, REVERSE_KL)),
    }
    if staged:
        del passes["divergences"]
    return {
        name: np.concatenate(ranks.forward(model, microbatches(), compute))
        for name, (model, compute) in passes.items()
    }


def values_on(mesh, cases):
    found = []
    for kind, changes, lora, dtype in cases:
        ranks, made = ParallelRanks(mesh), models(kind, changes, lora, FLOAT32)
        for model in made:
            ranks.divide(model, dtype)
        found.append(values(ranks, *made, mesh.config.pipeline > 1))
    return found


def values_alone(sizes, case):
    """The values of one process, whose linears sum in as many parts as tensor parallel ones."""
    made = models(*case)
    for model in made:
        model.split(sizes.get("tensor", 1))
    return values(ALONE, *made, "pipeline" in sizes)


@by_mesh
def test_values_of_a_pass_have_the_bits_of_one_process(sizes, cases):
    expected = [values_alone(sizes, case) for case in cases]
    for found in on_mesh(values_on, cases, **sizes):
        for case, own, alone in zip(cases, found, expected, strict=True):
            for name, array in alone.items():
                assert array.std() > 0
                np.testing.assert_array_equal(own[name], array, f"{name} of {case}")


# ---- gradients


def gradients(ranks, model):
    """Totals of a backward pass: of log-probs whose gradient is known beforehand where samples are
    packed, of log-probs and entropies for a sample alone."""

    def loss(batch):
        packed = len(batch.samples) > 1
        expected = torch.full((len(batch.targets),), 1 / 50) if packed else None
        logprobs, entropies = batch_logprobs(model, batch, SAMPLING, expected, entropy=not packed)
        total = logprobs.sum() + (0.0 if packed else 0.1 * entropies.sum())
        return total / 50, {"entropy": float(entropies.detach().sum())}

    return ranks.backward(model, microbatches(), loss)


def step_on(mesh, kind, changes, lora, dtype, checkpointing=False):
    """(totals, gradients of them, metrics of two updates, weights behind them)"""
    ranks, model = ParallelRanks(mesh), policy_of(kind, changes, lora, FLOAT32)
    model.checkpointing = checkpointing
    ranks.divide(model, dtype)
    totals, grads = gradients(ranks, model), whole_gradients(ranks, model)
    rows = updated(learner_of(model, ranks), microbatches())
    whole = policy_of(kind, changes, lora, FLOAT32)
    ranks.publish(model, whole if mesh.rank == 0 else None)
    return totals, grads, rows, whole.named_weights()


def whole_gradients(ranks, model):
    """The gradients of all weights, on rank 0, zeros if frozen; the parts are forgotten."""
    parts, pieces = ranks.trainable(model), ranks.pieces(model)
    grads = {
        name: parts[name].grad if name in parts else torch.zeros(box.shape)
        for name, box in pieces.own.items()
    }
    found = {name: grad.clone() for name, grad in pieces.collect(grads)}
    for part in parts.values():
        part.grad = None
    return found


def steps_on(mesh, cases):
    return [step_on(mesh, *case) for case in cases]


def step_alone(sizes, case):
    """The same as step_on, and the weights before."""
    model = policy_of(*case)
    model.split(sizes.get("tensor", 1))
    totals = gradients(ALONE, model)
    grads = {name: p.grad for name, p in model.trainable().items()}
    for parameter in model.trainable().values():
        parameter.grad = None
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    rows = updated(learner_of(model, ALONE), microbatches())
    return totals, grads, rows, model.named_weights(), before


@by_mesh
def test_a_step_is_that_of_one_process_but_for_the_order_of_sums(sizes, cases):
    """Sums of some hundred float32 products in another order differ by 1e-7 of their size, and so
    does a layer's gradient by those of the layers above. Adam divides a gradient by its size, also
    where the sum nearly cancels: hence more of what two steps change in a weight. bfloat16 rounds
    the gradients of activations between any two products. The loss has equal bits."""
    found = on_mesh(steps_on, cases, **sizes)
    for number, case in enumerate(cases):
        totals, grads, rows, weights, before = step_alone(sizes, case)
        (own_totals, own_grads, own_rows, own), *others = [rank[number] for rank in found]
        assert all(other[::2] == (own_totals, own_rows) for other in others)
        assert own_totals == totals and own_rows[0]["nll"] == rows[0]["nll"]
        bound, norm_bound = (1e-6, 1e-5) if case[-1] == FLOAT32 else (1e-2, 1e-2)
        for one, other in zip(own_rows, rows, strict=True):
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=norm_bound)
        assert own_grads.keys() == weights.keys()
        for name, grad in grads.items():
            assert grad.norm() > 0 and (own_grads[name] - grad).norm() <= bound * grad.norm(), name
            if case[-1] == FLOAT32:
                change = weights[name] - before[name]
                assert (own[name] - weights[name]).norm() <= 1e-3 * change.norm(), name


def test_a_mesh_gives_the_same_bits_again_and_so_does_checkpointing_of_activations():
    case = ("qwen3_moe", {}, None, FLOAT32)
    runs = [on_mesh(steps_on, [case, (*case, True)], context=2)[0] for _ in range(2)]
    (totals, grads, rows, weights), *others = [step for run in runs for step in run]
    for other in others:
        assert (other[0], other[2]) == (totals, rows)
        assert all(torch.equal(other[1][name], grad) for name, grad in grads.items())
        assert all(torch.equal(other[3][name], weight) for name, weight in weights.items())


# ---- memory


def activation_bytes(model):
    """Bytes that a backward pass keeps for each row: what 128 rows keep beyond what 64 do."""
    sizes = []
    for rows in (64, 128):
        tokens = random_tokens(np.random.default_rng(rows), rows + 1)
        kept = {}

        def keep(tensor, kept=kept):
            if tensor.layout == torch.strided:  # a packed weight is none
                kept[tensor.untyped_storage().data_ptr()] = tensor  # so no address comes again
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sample = make_sample(tokens, np.arange(rows + 1) > 0)
            batch_logprobs(model, pack([sample], rows)[0], SAMPLING)[0].sum().backward()
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return (sizes[1] - sizes[0]) / 64


def activation_bytes_on(mesh):
    ranks, model = ParallelRanks(mesh), exact_model("qwen3", **FOUR_HEADS)
    ranks.divide(model, FLOAT32)
    return activation_bytes(model)


def test_each_process_keeps_its_share_of_the_activations():
    """And a second copy of the values, by row and by head, which is 5% here."""
    alone = activation_bytes(exact_model("qwen3", **FOUR_HEADS))
    for size in (2, 4):
        for found in on_mesh(activation_bytes_on, context=size):
            assert alone <= found * size <= 1.06 * alone


# ---- what is refused
