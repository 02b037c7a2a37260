"""Divergences over the vocabulary against their definitions in float64: value, gradient, chunks,
and exact zeros."""

import math
from functools import partial
from typing import get_args

import pytest
import torch

from tandem.model.kernels import CPU
from tandem.model.logprobs import CHUNK_BYTES, Head, chunks
from tandem.plugins.distill.divergences import DivergenceKind, divergence
from tandem.plugins.distill.update import divergences

WIDTH, MANY = 16, 40_000
CHUNK = CHUNK_BYTES // (4 * MANY)  # rows whose logits over MANY tokens are held at once


def noise(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(rows, vocabulary, seed=0):
    """(hidden states, output projection): logits of a few nats."""
    return noise(rows, WIDTH, seed=seed), noise(vocabulary, WIDTH, seed=seed + 1) * 0.5


def head(hidden, weight):
    return Head(hidden, weight, CPU.pack(weight.detach()))


KINDS = [(kind, top_k) for kind in get_args(DivergenceKind) for top_k in (0, 3)]
BETA = 0.3


def distance(student, teacher, temperature, kind="reverse_kl", top_k=0):
    return divergences(
        student, teacher, temperature, partial(divergence, kind, beta=BETA, top_k=top_k)
    )


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


def by_definition(student, teacher, temperature, kind="reverse_kl", top_k=0):
    """Whole tables in float64; with top_k the others' probability is added up to one more token."""
    own, held = (
        (hidden @ weight.t() / temperature).softmax(-1) for hidden, weight in (student, teacher)
    )
    if top_k:
        first = torch.zeros_like(held).scatter(1, held.topk(top_k, -1).indices, 1.0)
        own, held = (
            torch.cat([p[first == 1].view(-1, top_k), (p * (1 - first)).sum(-1, True)], 1)
            for p in (own, held)
        )
    mixture = BETA * held + (1 - BETA) * own
    return {
        "reverse_kl": kl(own, held),
        "forward_kl": kl(held, own),
        "jsd": BETA * kl(held, mixture) + (1 - BETA) * kl(own, mixture),
    }[kind]


def doubled(tensors):
    return tuple(tensor.detach().double().requires_grad_() for tensor in tensors)


@pytest.mark.parametrize(("kind", "top_k"), KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 40), (12, 40), (CHUNK + 1, MANY)])
def test_value_and_gradient_are_those_of_autograd_on_whole_tables(
    rows, vocabulary, temperature, kind, top_k
):
    student, teacher = model(rows, vocabulary), model(rows, vocabulary, seed=7)
    above = noise(rows, seed=3)
    ours = tuple(tensor.clone().requires_grad_() for tensor in student)
    found = distance(head(*ours), head(*teacher), temperature, kind, top_k)
    (found * above).sum().backward()
    theirs = doubled(student)
    expected = by_definition(theirs, tuple(t.double() for t in teacher), temperature, kind, top_k)
    (expected * above).sum().backward()
    # torch adds up a row's exponentials in float32, with AVX2 in 8 lanes: off by up to 1.6e-5
    torch.testing.assert_close(found, expected.float(), rtol=3e-5, atol=3e-5)
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.grad.abs().max())
        # gaps of up to 30 nats, each times a probability that is as far off, cancel; measured:
        # under 2.1e-5
        torch.testing.assert_close(
            one.grad, other.grad.float(), rtol=0, atol=max(1e-4 * scale, 4e-5)
        )


def test_chunks_give_the_bits_of_one_row_at_a_time(threads):
    rows = 2 * CHUNK + 7
    assert len(chunks(rows, torch.empty(MANY, 0))) == 3
    (hidden, weight), (teacher, held) = model(rows, MANY), model(rows, MANY, seed=7)
    packed, held_packed = CPU.pack(weight), CPU.pack(held)
    whole = distance((hidden, weight, packed), (teacher, held, held_packed), 0.7)
    for at in (0, CHUNK - 1, CHUNK, 2 * CHUNK, rows - 1):
        own, other = hidden[at : at + 1].contiguous(), teacher[at : at + 1].contiguous()
        assert torch.equal(
            distance((own, weight, packed), (other, held, held_packed), 0.7), whole[at : at + 1]
        )


def test_jensen_shannon_disjoint_supports_bounded_and_finite():
    weight = torch.eye(40, WIDTH)
    hidden = (1000.0 * torch.eye(WIDTH)[:1]).requires_grad_()
    found = distance(head(hidden, weight), head(1000.0 * torch.eye(WIDTH)[1:2], weight), 1.0, "jsd")
    found.sum().backward()
    assert found.item() == pytest.approx(
        -BETA * math.log(BETA) - (1 - BETA) * math.log(1 - BETA), rel=1e-6
    )
    assert hidden.grad.isfinite().all()


def test_the_teacher_gets_no_gradient_and_no_positions_give_none():
    student, teacher = model(5, 40), model(5, 40, seed=7)
    tensors = [tensor.requires_grad_() for tensor in (*student, *teacher)]
    distance(head(*tensors[:2]), head(*tensors[2:]), 1.0).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, True, False, False]
    weight = student[1].detach().requires_grad_()
    none = distance(
        head(noise(0, WIDTH, seed=0), weight), head(noise(0, WIDTH, seed=0), weight.detach()), 1.0
    )
    none.sum().backward()
    assert len(none) == 0 and not weight.grad.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_projection_keeps_the_bits_of_hidden_gradients(frozen):
    gradients = []
    for fixed in (False, frozen):
        hidden, weight = model(9, 40)
        hidden.requires_grad_(), weight.requires_grad_(not fixed)
        distance(head(hidden, weight), head(*model(9, 40, seed=7)), 0.7).sum().backward()
        assert (weight.grad is None) == fixed
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
