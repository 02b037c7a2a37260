"""Stages of a pipeline compute what one process does: forward passes and gradients to the last bit,
but for the sum of a tied embedding's gradients, which is made in another order."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from tandem.model.forward import batch_logprobs, teacher_divergences
from tandem.model.load import make_exact
from tandem.model.lora import Lora
from tandem.rl.distillation import reverse_kl
from tandem.train.pack import pack
from tandem.train.parallel.pipeline import schedule
from tandem.train.parallel.ranks import ParallelRanks
from tandem.train.ranks import ALONE
from tandem.train.supervised import reference_answers
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model, random_samples, stock_model, tiny_config
from tests.support.updates import SAMPLING, Halves, learner_of, updated

BUDGETS = {1: 200, 2: 100, 5: 50}  # by how many microbatches they make
MESHES = [{"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "data": 2}]
EMBEDDING = "model.embed_tokens.weight"


def microbatches(count):
    batches = pack(random_samples(np.random.default_rng(5), 6), BUDGETS[count])
    assert len(batches) == count
    return batches


def four_layers(tied, *dtypes):
    """dtypes: to which the weights are rounded, one after the other."""
    module = stock_model(tiny_config("qwen3", num_hidden_layers=4, tie_word_embeddings=tied))
    for dtype in dtypes:
        module = module.to(dtype)
    return make_exact(module)


def divided(model, mesh, dtype=torch.float32):
    ranks = ParallelRanks(mesh)
    ranks.divide(model, dtype)
    return ranks


def losses(model, scale=50):
    def loss(batch):
        logprobs, _ = batch_logprobs(model, batch, SAMPLING)
        return -logprobs.sum() / scale, {"nll": -float(logprobs.detach().sum())}

    return loss


def logprobs_of(ranks, model, batches):
    return ranks.forward(model, batches, lambda b: batch_logprobs(model, b, SAMPLING)[0])


def train(learner, batches):
    """(log-probs, metrics of two optimizer steps)"""
    return logprobs_of(learner.ranks, learner.model, batches), updated(learner, batches)


def same(found, expected):
    (values, rows), (own, own_rows) = found, expected
    return rows == own_rows and all(map(np.array_equal, values, own))


# ---- one optimizer step


def train_stages(mesh, dtype, checkpointing):
    found = {}
    for count in BUDGETS:
        model = four_layers(False, dtype, torch.float32)
        model.checkpointing = checkpointing
        ranks = divided(model, mesh, dtype)
        learner = learner_of(model, ranks)
        trained = train(learner, microbatches(count))
        whole = four_layers(tied=False) if mesh.rank == 0 else None
        ranks.publish(model, whole)
        found[count] = (trained, None if whole is None else whole.named_weights())
    return found


@pytest.mark.parametrize(
    ("sizes", "dtype", "checkpointing"),
    [
        *((sizes, torch.float32, False) for sizes in MESHES),
        ({"pipeline": 2}, torch.bfloat16, True),
        ({"pipeline": 2, "data": 2}, torch.bfloat16, True),
    ],
)
def test_two_steps_of_stages_have_the_bits_of_one_process(sizes, dtype, checkpointing):
    by_rank = on_mesh(train_stages, dtype, checkpointing, **sizes)
    for count in BUDGETS:
        model = four_layers(False, dtype)
        learner = learner_of(model, Halves(sizes.get("data", 1)))
        expected = train(learner, microbatches(count))
        assert all(same(found[count][0], expected) for found in by_rank)
        weights, own = by_rank[0][count][1], model.named_weights()
        assert own.keys() == weights.keys()
        assert all(torch.equal(weights[name].to(dtype), weight) for name, weight in own.items())


def tied_stages(mesh):
    found = {}
    for count in BUDGETS:
        model, batches = four_layers(tied=True), microbatches(count)
        learner = learner_of(model, divided(model, mesh))
        learner.ranks.backward(model, batches, losses(model))
        parts = learner.optimizer.parameters
        gradients = {name: part.grad.clone() for name, part in parts.items()}
        learner.optimizer.update()
        updated(learner, batches)
        found[count] = gradients, {name: part.detach() for name, part in parts.items()}
    return found


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_embedding_is_equal_in_both_stages_and_sums_its_gradient_first_and_last(stages):
    by_rank = on_mesh(tied_stages, pipeline=stages)
    for count in BUDGETS:
        model = four_layers(tied=True)
        ALONE.backward(model, microbatches(count), losses(model))
        for found in by_rank:
            gradients, _ = found[count]
            for name, gradient in gradients.items():
                alone = model.trainable()[name].grad
                if name == EMBEDDING and count > 1:  # the same terms, added in another order
                    bound = 2 * count * torch.finfo(torch.float32).eps * alone.abs().max()
                    assert (gradient - alone).abs().max() <= bound
                else:
                    assert torch.equal(gradient, alone)
        first, *between, last = (found[count][1] for found in by_rank)
        assert torch.equal(first[EMBEDDING], last[EMBEDDING])
        assert not any(EMBEDDING in weights for weights in between)


# ---- what a stage holds


def names_of_stage(mesh):
    model = four_layers(tied=False)
    divided(model, mesh)
    return [name for name, _ in model.module.named_parameters()], sum(
        p.numel() for p in model.parameters()
    )


def test_each_weight_is_in_one_stage_under_its_own_name():
    stages, whole = on_mesh(names_of_stage, pipeline=2), four_layers(tied=False)
    assert [name for names, _ in stages for name in names] == list(whole.named_weights())
    assert "model.layers.1.mlp.up_proj.weight" in stages[0][0]
    assert "model.layers.2.mlp.up_proj.weight" in stages[1][0]
    assert sum(numbers for _, numbers in stages) == sum(p.numel() for p in whole.parameters())


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


# ---- models beside the one that learns


def adapted():
    config = tiny_config("qwen3", num_hidden_layers=4)
    return make_exact(stock_model(config), Lora(rank=2, alpha=4.0, targets=("q_proj",), seed=0))


def without_adapter(mesh):
    model = adapted()
    learner = learner_of(model, ALONE if mesh is None else divided(model, mesh))
    batches = microbatches(2)
    rows = updated(learner, batches)
    return rows, reference_answers(model, batches, learner.ranks)


def test_adapter_is_off_in_every_stage_of_the_reference():
    (rows, reference), (own_rows, own) = (
        on_mesh(without_adapter, pipeline=2)[1],
        without_adapter(None),
    )
    assert rows == own_rows and reference.keys() == own.keys()
    assert all(np.array_equal(reference[number], values) for number, values in own.items())


def distilled(mesh):
    student, teacher = four_layers(tied=False), exact_model("llama", 5, num_hidden_layers=3)
    learner = learner_of(student, ALONE if mesh is None else divided(student, mesh))
    if mesh is not None:
        learner.ranks.divide(teacher, torch.float32)

    def loss(batch):
        terms = teacher_divergences(student, teacher, batch, 0.7, reverse_kl)
        return terms.sum() / 50, {"kl": float(terms.detach().sum())}

    return [learner.update(microbatches(5), loss, frozen=[teacher]) for _ in range(2)]


def test_frozen_teacher_runs_through_the_same_stages():
    expected = distilled(None)
    assert expected[1]["kl"] < expected[0]["kl"]
    assert on_mesh(distilled, pipeline=2) == [expected] * 2


# ---- what goes wrong


def fails_at_second(mesh):
    model = four_layers(tied=False)
    ranks, count = divided(model, mesh), 0

    def loss(batch):
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a microbatch that cannot be")
        return losses(model)(batch)

    try:
        ranks.backward(model, microbatches(5), loss)
    except Exception as error:
        return repr(error)


def test_error_of_the_last_stage_ends_all_stages():
    *others, last = on_mesh(fails_at_second, pipeline=4)
    assert "a microbatch that cannot be" in last
    ends = ("Connection closed by peer", "reset by peer")
    assert all(any(end in other for end in ends) for other in others)
