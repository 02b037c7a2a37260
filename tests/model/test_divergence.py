"""Reverse KL over the vocabulary against its definition in float64: value, gradient, chunks, and exact zeros."""

import math

import pytest
import torch

from tandem.model.divergence import reverse_kl
from tandem.model.linear import pack
from tandem.model.logprobs import CHUNK_BYTES, chunks

WIDTH, MANY = 16, 40_000
CHUNK = CHUNK_BYTES // (4 * MANY)  # rows whose logits over MANY tokens are held at once


def noise(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(rows, vocabulary, seed=0):
    """(hidden states, output projection): logits of a few nats."""
    return noise(rows, WIDTH, seed=seed), noise(vocabulary, WIDTH, seed=seed + 1) * 0.5


def head(hidden, weight):
    return hidden, weight, pack(weight.detach())


def by_definition(student, teacher, temperature):
    """sum p (log p - log q), whole tables in float64."""
    own, held = ((hidden @ weight.t() / temperature).log_softmax(-1) for hidden, weight in (student, teacher))
    return (own.exp() * (own - held)).sum(-1)


def doubled(tensors):
    return tuple(tensor.detach().double().requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 40), (12, 40), (CHUNK + 1, MANY)])
def test_value_and_gradient_are_those_of_autograd_on_whole_tables(rows, vocabulary, temperature):
    student, teacher = model(rows, vocabulary), model(rows, vocabulary, seed=7)
    above = noise(rows, seed=3)
    ours = tuple(tensor.clone().requires_grad_() for tensor in student)
    found = reverse_kl(head(*ours), head(*teacher), temperature)
    (found * above).sum().backward()
    theirs = doubled(student)
    expected = by_definition(theirs, tuple(t.double() for t in teacher), temperature)
    (expected * above).sum().backward()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)  # a float32 sum over the vocabulary
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.grad.abs().max())
        # gaps of up to 30 nats, each times a probability that is off by 2e-6, cancel; measured: under 5e-5
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=0, atol=1e-4 * scale)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_chunks_give_the_bits_of_one_row_at_a_time(threads):
    rows = 2 * CHUNK + 7
    assert len(chunks(rows, MANY)) == 3
    (hidden, weight), (teacher, held) = model(rows, MANY), model(rows, MANY, seed=7)
    packed, held_packed = pack(weight), pack(held)
    whole = reverse_kl((hidden, weight, packed), (teacher, held, held_packed), 0.7)
    for at in (0, CHUNK - 1, CHUNK, 2 * CHUNK, rows - 1):
        own, other = hidden[at : at + 1].contiguous(), teacher[at : at + 1].contiguous()
        assert torch.equal(reverse_kl((own, weight, packed), (other, held, held_packed), 0.7), whole[at : at + 1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_between_equal_models_it_is_exactly_zero_and_so_is_its_gradient(temperature):
    for rows, vocabulary in ((12, 40), (CHUNK + 1, MANY)):
        hidden, weight = (tensor.requires_grad_() for tensor in model(rows, vocabulary))
        found = reverse_kl(head(hidden, weight), head(hidden.detach(), weight.detach()), temperature)
        found.sum().backward()
        assert not found.any() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2, 1.0])
def test_it_is_not_negative_beyond_rounding(apart):
    hidden, weight = model(300, 40)
    near = hidden + apart * noise(300, WIDTH, seed=5)
    found = reverse_kl(head(hidden, weight), head(near, weight), 1.0)
    assert found.min() > -1e-6  # 40 terms of at most 0.4 nats, each off by a rounding of 6e-8
    assert apart < 1e-2 or (found > 0).all()


def test_a_likely_token_that_the_teacher_rules_out_is_dear_and_finite():
    weight = torch.eye(40, WIDTH)
    sure, other = (100.0 * torch.eye(WIDTH)[n : n + 1] for n in (0, 1))
    assert float(reverse_kl(head(sure, weight), head(other, weight), 1.0)) == pytest.approx(100.0)
    assert math.isfinite(float(reverse_kl(head(sure, weight), head(other, weight), 0.01)))


def test_the_teacher_gets_no_gradient_and_no_positions_give_none():
    student, teacher = model(5, 40), model(5, 40, seed=7)
    tensors = [tensor.requires_grad_() for tensor in (*student, *teacher)]
    reverse_kl(head(*tensors[:2]), head(*tensors[2:]), 1.0).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, True, False, False]
    weight = student[1].detach().requires_grad_()
    none = reverse_kl(head(noise(0, WIDTH, seed=0), weight), head(noise(0, WIDTH, seed=0), weight.detach()), 1.0)
    none.sum().backward()
    assert len(none) == 0 and not weight.grad.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_projection_gets_no_gradient_and_changes_that_of_the_states_by_no_bit(frozen):
    gradients = []
    for fixed in (False, frozen):
        hidden, weight = model(9, 40)
        hidden.requires_grad_(), weight.requires_grad_(not fixed)
        reverse_kl(head(hidden, weight), head(*model(9, 40, seed=7)), 0.7).sum().backward()
        assert (weight.grad is None) == fixed
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
