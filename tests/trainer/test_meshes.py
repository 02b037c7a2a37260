"""A model on a mesh computes what one process computes. A forward pass has its bits on every mesh,
and so have two optimizer steps where only microbatches or layers are divided. On other meshes
steps differ by the order of sums."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tandem.model.expert_choices import replayed_experts
from tandem.model.forward import batch_logprobs, batch_values
from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.model.probe import probe
from tandem.model.schedule import random_model, threads_of
from tandem.plugins.distill.divergences import divergence, reverse_kl
from tandem.plugins.distill.update import teacher_divergences
from tandem.plugins.offline.supervised import reference_answers
from tandem.plugins.optim.adamw_8bit import Optimizer8bit
from tandem.plugins.optim.muon import Muon
from tandem.plugins.optim.offload import OffloadedOptimizer
from tandem.runtime.errors import InvariantError
from tandem.trainer.checks import require_frozen
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.pack import pack
from tandem.trainer.parallel import pieces
from tandem.trainer.parallel.pipeline import schedule
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.trainer.ranks import ALONE
from tandem.types import SamplingDistribution
from tests.support.meshes import collected, on_mesh, peak_bytes
from tests.support.parity import engine_for, largest_gap, random_requests
from tests.support.tiny import (
    VOCAB,
    exact_model,
    make_sample,
    random_samples,
    random_tokens,
    stock_model,
    tiny_config,
    value_twins,
)
from tests.support.updates import (
    Halves,
    copied,
    learner_of,
    microbatches,
    require_same_change,
    updated,
)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}
KINDS: dict[str, dict[str, Any]] = {  # biases behind the sums, too
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {"num_experts": 8},
}
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",), seed=3)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SAMPLING = SamplingDistribution(temperature=0.7, repetition_penalty=1.3)
REVERSE_KL = partial(divergence, "reverse_kl", beta=0.5, top_k=0)


class Case(NamedTuple):
    """A model, and how many microbatches it is given."""

    kind: str
    lora: Lora | None = None
    dtype: torch.dtype = FLOAT32
    layers: int = 2
    tied: bool = True
    checkpointing: bool = False
    only_two: bool = False  # every token chooses expert 0 or expert 1
    count: int | None = None  # None: all
    optimizer: Any = Optimizer
    replay: bool = False  # the experts of most tokens are given


STAGED = Case("qwen3", layers=4, tied=False)
STAGES = [*(STAGED._replace(count=n) for n in (1, 2, None)), STAGED._replace(tied=True)]
ROUNDED = STAGED._replace(dtype=BFLOAT16, checkpointing=True)
DENSE, SPARSE = [Case("qwen3"), Case("llama")], Case("qwen3_moe")
ADAPTED = Case("qwen2", LORA)
ADAPTERS = [ADAPTED, ADAPTED._replace(dtype=BFLOAT16)]
FEW = Case("qwen3_moe", only_two=True, checkpointing=True)
REPLAYED = SPARSE._replace(replay=True)
KEPT_APART = Case("qwen3", optimizer=partial(OffloadedOptimizer, bucket=20_000))
OTHERS = [case._replace(optimizer=o) for case in (DENSE[0], SPARSE) for o in (Muon, Optimizer8bit)]
MESHES: list[tuple[dict[str, int], list[Case]]] = [
    ({"data": 2}, [*DENSE, SPARSE, *ADAPTERS, REPLAYED, KEPT_APART]),
    ({"data": 4}, [Case("llama"), SPARSE]),
    ({"data": 4, "shard": 2}, [Case("qwen3"), SPARSE]),
    ({"tensor": 2}, [*DENSE, Case("qwen2"), SPARSE, ADAPTED]),
    ({"tensor": 4}, [Case("llama"), SPARSE, ADAPTED]),
    ({"data": 2, "tensor": 2}, [Case("llama"), ADAPTED, FEW]),
    ({"context": 2}, [Case("qwen3"), Case("qwen3", dtype=BFLOAT16), SPARSE]),
    ({"context": 4}, [Case("qwen3")]),
    ({"data": 2, "context": 2}, [Case("qwen3"), Case("mistral"), ADAPTED]),
    ({"context": 2, "tensor": 2}, [Case("qwen3")]),
    ({"context": 2, "pipeline": 2}, [Case("mistral")]),
    ({"context": 2, "expert": 2}, [SPARSE]),
    ({"pipeline": 2}, [*STAGES, ROUNDED]),
    ({"pipeline": 4}, STAGES),
    ({"pipeline": 2, "data": 2}, [*STAGES, ROUNDED]),
    ({"pipeline": 2, "expert": 2}, [SPARSE]),
    ({"expert": 2}, [SPARSE, SPARSE._replace(dtype=BFLOAT16), REPLAYED]),
    ({"data": 2, "expert": 2}, [SPARSE, FEW]),
    ({"expert": 2, "tensor": 2}, [SPARSE, FEW]),
]
# of four processes
COMMIT = ("data4-shard2", "data2-tensor2", "context2-pipeline2", "data2-expert2")


def mesh_param(sizes, cases):
    name = "-".join(f"{dimension}{size}" for dimension, size in sizes.items())
    nightly = name not in COMMIT and sizes not in [{dimension: 2} for dimension in sizes]
    return pytest.param(sizes, cases, id=name, marks=[pytest.mark.nightly] * nightly)


def policy_of(case, seed=0):
    """A model in float32, of which every bias and every adapter does something."""
    changes = {**KINDS.get(case.kind, {}), "num_hidden_layers": case.layers}
    if not case.tied:
        changes["tie_word_embeddings"] = False
    if case.only_two:
        changes |= {"num_experts_per_tok": 1, "norm_topk_prob": False}
    config = tiny_config(case.kind, **HEADS, **changes)
    model = make_exact(stock_model(config, seed=seed), case.lora)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias") or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=noise)
    for layer in model.module.model.layers if case.only_two else ():
        weight = layer.mlp.gate.weight.data
        weight[1], weight[2:] = -weight[0], 0.0
    model.checkpointing = case.checkpointing
    return model


def cast(model, *dtypes):
    """Give the parameters of a model other types, and buffers none, as `load_model` does."""
    for parameter in model.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.grad_dtype = FLOAT32
    return model


def models(case, sizes, *dtypes):
    """The policy; where rows are divided a teacher and a value model, too."""
    made = [policy_of(case)]
    if "context" in sizes:
        shape = HEADS | KINDS.get(case.kind, {})
        made += [exact_model(case.kind, 1, **shape), value_twins(case.kind, **shape)[0]]
    return [cast(model, *dtypes) for model in made]


def batches_of(case, shares):
    """Packed groups; one sequence whose first rows predict no target; two rows, fewer than ranks,
    so that some have padding only."""
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, 90)
    lonely = make_sample(tokens, np.arange(90) >= 70), make_sample(tokens[:3], [False, True, True])
    samples = random_samples(rng, 6)
    if case.replay:
        each = np.tile(np.arange(8, dtype=np.int16), (VOCAB, case.layers, 1))
        given = rng.permuted(each, axis=2)[..., :2]
        samples = [replace(one, experts=given[one.tokens[:-1]]) for one in samples]
    packed = pack(samples, 90, shares=shares)
    return [*packed, *(pack([one], 90)[0] for one in lonely)][: case.count]


# ---- what a mesh computes, and one process


def values(ranks, made, batches, sizes):
    """The values of all targets that passes give, by model; of others beside the policy, if there
    are any. A pipeline's frozen models run with a loss alone."""
    policy, *others = made

    def both(batch):
        choices = replayed_experts(batch, policy.device)
        return torch.stack(batch_logprobs(policy, batch, SAMPLING, choices=choices))

    passes = {"policy": (policy, both)}
    if others:
        teacher, critic = others
        passes["critic"] = critic, lambda b: batch_values(critic, b)
    if others and "pipeline" not in sizes:
        passes["teacher"] = (
            policy,
            lambda b: teacher_divergences(policy, teacher, b, 0.7, REVERSE_KL),
        )
    return {
        name: np.concatenate(ranks.forward(model, batches, compute), -1)
        for name, (model, compute) in passes.items()
    }


def backward(ranks, model, batches):
    """Totals of a backward pass: of log-probs whose gradient is known beforehand where samples are
    packed, of log-probs and entropies for a sample alone."""

    def loss(batch):
        packed = len(batch.samples) > 1
        expected = torch.full((len(batch.targets),), 1 / 50) if packed else None
        logprobs, entropies = batch_logprobs(
            model,
            batch,
            SAMPLING,
            expected,
            entropy=not packed,
            choices=replayed_experts(batch, model.device),
        )
        total = logprobs.sum() + (0.0 if packed else 0.1 * entropies.sum())
        return total / 50, {"entropy": float(entropies.detach().sum())}

    return ranks.backward(model, batches, loss)


def whole_gradients(ranks, model):
    """The gradients of all weights, on rank 0, zeros if frozen; the parts are forgotten."""
    parts, pieces = ranks.trainable(model), ranks.pieces(model)
    grads = {name: part.grad for name, part in parts.items()}
    if pieces.own is not None:
        zeros = {name: torch.zeros(box.shape) for name, box in pieces.own.items()}
        grads = collected(pieces, {**zeros, **grads})
    for part in parts.values():
        part.grad = None
    return grads


def computed(case, ranks, made, sizes):
    """(values, totals of a backward pass, gradients, metrics of two updates); the updates have a
    loss that balances experts where all ranks see all rows."""
    policy, batches = made[0], batches_of(case, ranks.shares)
    passed = values(ranks, made, batches, sizes)
    totals, grads = backward(ranks, policy, batches), whole_gradients(ranks, policy)
    balances = not {"pipeline", "context"} & set(sizes)
    learner = learner_of(policy, ranks, kind=case.optimizer)
    rows = updated(replace(learner, router_aux_loss_coef=0.1 * balances), batches)
    return passed, totals, grads, rows


def run_on(mesh, cases, sizes):
    """The results of `computed` for each case, and the weights on rank 0."""
    found = []
    for case in cases:
        made, ranks = models(case, sizes, case.dtype, FLOAT32), ParallelRanks(mesh)
        for model in made:
            ranks.divide(model, case.dtype)
        whole = policy_of(case, seed=1) if mesh.rank == 0 else None
        parts = computed(case, ranks, made, sizes)
        ranks.publish(made[0], whole)
        found.append((*parts, whole and whole.named_weights()))
    return found


def run_alone(case, sizes):
    """The same of one process with one thread, as a router's gradient depends on it; and the
    weights before. Its linears sum in as many parts as tensor parallel ones."""
    made = models(case, sizes, case.dtype)
    ranks, policy = Halves(sizes.get("data", 1) * sizes.get("expert", 1)), made[0]
    for model in made:
        model.split(sizes.get("tensor", 1))
    before = copied(policy)
    with threads_of(1):
        return *computed(case, ranks, made, sizes), policy.named_weights(), before


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        *(mesh_param(*mesh) for mesh in MESHES),
        pytest.param({"data": 2}, OTHERS, id="optimizers", marks=pytest.mark.nightly),
    ],
)
def test_a_mesh_computes_what_one_process_does(sizes, cases):
    """Sums of some hundred float32 products in another order differ by 1e-7 of their size, and so
    does a layer's gradient by those of the layers above. Adam divides a gradient by its size, also
    where the sum nearly cancels: hence more of what two steps change in a weight. bfloat16 rounds
    the gradients of activations between any two products. The loss has equal bits."""
    for case, found in zip(
        cases, zip(*on_mesh(run_on, cases, sizes, **sizes), strict=True), strict=True
    ):
        passed, totals, grads, rows, weights, before = run_alone(case, sizes)
        (_, own_totals, own_grads, own_rows, own), *others = found
        for own_passed, *_ in found:
            for name, array in passed.items():
                assert array.std() > 0
                np.testing.assert_array_equal(own_passed[name], array, f"{name} of {case}")
        assert all((other[1], other[3]) == (own_totals, own_rows) for other in others)
        assert own_totals == totals and own_rows[0]["nll"] == rows[0]["nll"]
        assert own_grads.keys() == own.keys() == weights.keys()
        assert all(grad.norm() > 0 for grad in grads.values()) or case.only_two
        if set(sizes) <= {"data", "pipeline"} and not (case.tied and "pipeline" in sizes):
            assert own_rows == rows
            assert all(torch.equal(own_grads[name], grad) for name, grad in grads.items())
            for name, weight in weights.items():
                # AdamW rounds the last few elements of a vector's part differently
                rest = "data" in sizes and weight.dim() == 1 and len(weight) % (16 * sizes["data"])
                assert rest or case.lora or torch.equal(own[name].to(case.dtype), weight), name
        exact = case.dtype == FLOAT32
        if exact:
            require_same_change(own, weights, before)
        for name, grad in grads.items():
            difference = (own_grads[name] - grad).norm()
            assert difference <= (1e-5 if exact else 1e-2) * grad.norm(), (case, name)
        for one, other in zip(own_rows, rows, strict=True):
            # a stage, and a part of the rows, know not all of a router
            whole = not {"pipeline", "context"} & set(sizes)
            whole &= (
                exact or one is own_rows[0]
            )  # an update in bfloat16 may change a token's experts
            names = [n for n in other if whole or not n.startswith("router/")]
            compared = {name: one[name] for name in names}
            expected = {name: other[name] for name in names}
            assert compared == pytest.approx(expected, rel=2e-5 if exact else 1e-2)


def test_a_mesh_gives_the_same_bits_again_and_so_does_checkpointing_of_activations():
    cases, sizes = [SPARSE, SPARSE._replace(checkpointing=True)], {"context": 2}
    runs = [on_mesh(run_on, some, sizes, **sizes)[0] for some in (cases, cases[:1])]
    (_, totals, grads, rows, weights), *others = [step for run in runs for step in run]
    for other in others:
        assert (other[1], other[3]) == (totals, rows)
        assert all(torch.equal(other[2][name], grad) for name, grad in grads.items())
        assert all(torch.equal(other[4][name], weight) for name, weight in weights.items())


# ---- an engine that sums in as many parts


def masters_on(mesh, case):
    """The masters of a divided model before any update, on rank 0."""
    ranks = ParallelRanks(mesh)
    learner = learner_of(ranks.divide(cast(policy_of(case), case.dtype), case.dtype), ranks)
    return collected(learner.optimizer.whole, learner.optimizer.weights())


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"data": 2, "expert": 2}], ids=str)
def test_masters_start_with_the_bits_of_one_process(sizes):
    case = SPARSE._replace(dtype=BFLOAT16)
    found, *_ = on_mesh(masters_on, case, **sizes)
    alone = learner_of(cast(policy_of(case), BFLOAT16), ALONE).optimizer.weights()
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], master) for name, master in alone.items())


def gaps_on(mesh, cases):
    return [gaps_of(mesh, case) for case in cases]


def gaps_of(mesh, case):
    """The largest gap between rank 0's engine, over a whole model, and the divided model, before
    and after an update; with the split, and without."""
    model, ranks = policy_of(case), ParallelRanks(mesh)
    ranks.divide(model, case.dtype)
    learner, whole = learner_of(model, ranks), cast(policy_of(case), case.dtype)
    requests = random_requests(np.random.default_rng(2), prompts=3, longest=60, group=2)
    gaps = []
    for splits in (mesh.config.tensor, mesh.config.tensor, 1):
        if len(gaps) == 1:
            updated(learner, microbatches(ranks.shares), steps=1)
            ranks.publish(model, whole if ranks.rank == 0 else None)
        whole.split(splits)
        completions = engine_for(whole).generate(requests) if mesh.rank == 0 else None
        completions = mesh.world.gather(completions, "completions")[0]
        with torch.no_grad():
            gaps.append(largest_gap(model, requests, completions, 300, gradients=False))
    return gaps


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"tensor": 2}, [Case("qwen3"), ADAPTED]),
        pytest.param({"tensor": 4}, [Case("llama"), SPARSE], marks=pytest.mark.nightly),
        ({"data": 2, "tensor": 2}, [SPARSE]),
    ],
)
def test_an_engine_that_sums_in_as_many_parts_has_the_trainers_bits(sizes, cases):
    both = [case._replace(dtype=dtype) for case in cases for dtype in (FLOAT32, BFLOAT16)]
    for before, after, without in on_mesh(gaps_on, both, **sizes)[0]:
        assert before == after == 0.0 < without


def test_the_probe_of_a_model_that_sums_in_parts_tries_those_sums():
    model = policy_of(SPARSE)
    model.split(4)
    assert random_model(model, 0).splits == 4
    assert probe(model).parity == []


# ---- what a process holds and keeps


def held_on(mesh, case):
    model, ranks = policy_of(case), ParallelRanks(mesh)
    ranks.divide(model, FLOAT32)
    return {name: part.numel() for name, part in ranks.parts(model).items()}


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"expert": 2}, {"data": 2, "expert": 2}])
def test_each_number_is_held_once_under_the_name_of_its_weight(sizes):
    case = STAGED if "pipeline" in sizes else SPARSE
    parts, whole = on_mesh(held_on, case, **sizes), policy_of(case).named_weights()
    for name, weight in whole.items():
        held = [own[name] for own in parts if name in own]
        assert sum(held) == weight.numel() and len(held) == (1 if case == STAGED else len(parts))


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
    ranks, model = ParallelRanks(mesh), policy_of(Case("qwen3"))
    ranks.divide(model, FLOAT32)
    return activation_bytes(model)


def test_each_process_keeps_its_share_of_the_activations():
    """And a second copy of the values, by row and by head, which is 5% here."""
    alone = activation_bytes(policy_of(Case("qwen3")))
    for size in (2, 4):
        for found in on_mesh(activation_bytes_on, context=size):
            assert alone <= found * size <= 1.06 * alone


def test_a_stage_keeps_the_activations_of_as_many_microbatches_as_stages_follow():
    for stages in range(1, 6):
        for count in range(1, 9):
            for stage in range(stages):
                order = schedule(stage, stages, count)
                for forward in (True, False):
                    numbers = [run.number for run in order if run.is_forward == forward]
                    assert numbers == list(range(count))
                kept = list(accumulate(1 if run.is_forward else -1 for run in order))
                assert min(kept) == 0 and max(kept) == min(stages - stage, count)


BUCKET = 1 << 15
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}


def peak_on(mesh):
    """(bytes of the bfloat16 weights, most bytes that `divide` has allocated at once)"""
    stock = stock_model(tiny_config("qwen3", **WIDE)).to(BFLOAT16)
    model, ranks = make_exact(stock), ParallelRanks(mesh)
    size = sum(2 * weight.numel() for weight in model.module.parameters())
    return size, peak_bytes(lambda: ranks.divide(model, BFLOAT16))


@pytest.mark.parametrize(("sizes", "most"), [({"data": 2}, 1.9), ({"tensor": 2}, 0.6)])
def test_a_model_is_never_whole_in_float32_while_it_is_divided(sizes, most):
    """Twice its size in bfloat16 would be whole. With data the parts are as large as that, and a
    layer of eight a quarter."""
    for size, more in on_mesh(peak_on, **sizes):
        assert more < most * size


def published_on(mesh, bucket):
    """Bytes of the largest tensor that a copy to a whole model makes; whether it has all bits."""
    model, whole = (exact_model("qwen3", **WIDE) for _ in range(2))
    given = {name: weight.detach().clone() for name, weight in whole.module.named_parameters()}
    ranks, usual = ParallelRanks(mesh), pieces.BUCKET_BYTES
    ranks.divide(model, FLOAT32)
    for weight in whole.module.parameters():
        weight.data.zero_()
    pieces.BUCKET_BYTES = bucket
    with torch.profiler.profile(profile_memory=True) as profile:
        ranks.publish(model, whole if mesh.rank == 0 else None)
    pieces.BUCKET_BYTES = usual
    made = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(made), all(torch.equal(w, given[n]) for n, w in whole.module.named_parameters())


@pytest.mark.parametrize("bucket", [BUCKET, 1 << 14, 0])
def test_no_more_than_a_bucket_is_gathered_for_the_whole_model_of_rank_0(bucket):
    """The largest weight has 16 times as many bytes as BUCKET; a row is the least."""
    (most, equal), (others, _) = on_mesh(published_on, bucket, data=2)
    assert equal and 0 < max(most, others) <= max(bucket, 4 * WIDE["intermediate_size"])


# ---- models and optimizers beside it


def beside_on(mesh):
    """Metrics of two updates, and what an adapter's reference says; metrics of a student that
    learns from a teacher. mesh None: of one process."""
    made = [policy_of(STAGED._replace(kind="qwen2", lora=LORA)), policy_of(STAGED)]
    adapted, student = made
    teacher = exact_model("llama", 5, num_hidden_layers=3)
    ranks, batches = ALONE if mesh is None else ParallelRanks(mesh), batches_of(STAGED, 1)
    for model in [] if mesh is None else [*made, teacher]:
        ranks.divide(model, FLOAT32)

    def loss(batch):
        terms = teacher_divergences(student, teacher, batch, 0.7, reverse_kl)
        return terms.sum() / 50, {"kl": float(terms.detach().sum())}

    rows, learner = updated(learner_of(adapted, ranks), batches), learner_of(student, ranks)
    distilled = [learner.update(batches, loss, frozen=[teacher]) for _ in range(2)]
    return rows, reference_answers(adapted, batches, ranks), distilled


def test_a_reference_without_its_adapter_and_a_frozen_teacher_run_through_the_same_stages():
    (rows, answers, distilled), expected = on_mesh(beside_on, pipeline=2)[1], beside_on(None)
    assert rows == expected[0] and distilled == expected[2]
    assert distilled[1]["kl"] < distilled[0]["kl"] and answers.keys() == expected[1].keys()
    assert all(np.array_equal(answers[number], own) for number, own in expected[1].items())


def shares_memory_on(mesh):
    """Tell whether a reference is taken for the trained policy: one of its own, the policy, and
    the policy without its adapter."""

    def is_refused(policy, reference):
        try:
            require_frozen(reference, learner_of(policy, ranks))
        except InvariantError:
            return True
        return False

    ranks = ParallelRanks(mesh)
    policy, reference = exact_model("qwen3"), exact_model("qwen3", seed=1)
    own_base = policy_of(ADAPTED)
    for model in (policy, reference, own_base):
        ranks.divide(model, FLOAT32)
    return [is_refused(*pair) for pair in ((policy, reference), (policy, policy), (own_base,) * 2)]


def test_a_divided_reference_shares_no_memory_with_the_policy():
    assert on_mesh(shares_memory_on, data=2) == [[False, True, False]] * 2


# ---- collectives


def groups_on(mesh):
    return len(dist.distributed_c10d._world.pg_names)


def test_groups_of_equal_members_are_one_and_a_process_makes_its_own_only():
    """PyTorch's first, all, two pairs and the process alone, where there were 26."""
    assert on_mesh(groups_on, data=2, tensor=2) == [5] * 4


def reductions_on(mesh, budget):
    """(microbatches of each process, sums of gradients announced in one update)"""
    announced = []

    def announce(what, ranks):
        announced.append(what)
        return nullcontext()

    watched = replace(
        mesh,
        groups={key: replace(group, announce=announce) for key, group in mesh.groups.items()},
        shards=replace(mesh.shards, announce=announce),
        replicas=replace(mesh.replicas, announce=announce),
    )
    model, ranks = exact_model("qwen3"), ParallelRanks(watched)
    ranks.divide(model, FLOAT32)
    batches = pack(random_samples(np.random.default_rng(5), 6), budget, shares=2)
    updated(learner_of(model, ranks), batches, steps=1)
    return len(batches) / 2, announced.count("gradients")


def test_accumulation_over_microbatches_sums_gradients_over_processes_once():
    """Once for each of the two layers and for what is outside of them."""
    few, many = (on_mesh(reductions_on, budget, data=2) for budget in (400, 40))
    assert few == [(1, 3)] * 2
    assert many[0][0] >= 3 and [sums for _, sums in many] == [3, 3]
