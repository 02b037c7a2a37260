"""Muon against its definition in float64, against itself after a reload and over processes, and on
a task that can be learned."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tandem.plugins.optim.muon import Muon, is_hidden_matrix, orthogonalized
from tandem.runtime import numerics
from tandem.trainer.parallel.ranks import ParallelRanks
from tests.support.meshes import on_mesh
from tests.support.optimizers import bits, check_reload, optimizer, random_parameters, set_gradients
from tests.support.tiny import exact_model

LAYER = "model.layers.0."
WIDE, TALL = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.up_proj.weight"
EXPERTS = f"{LAYER}mlp.experts."
MUON = {
    WIDE: (6, 10),
    TALL: (14, 10),
    f"{EXPERTS}gate_up_proj": (3, 8, 10),
    f"{EXPERTS}down_proj": (3, 10, 4),
}
ADAMW = {
    "model.embed_tokens.weight": (30, 10),
    "lm_head.weight": (30, 10),
    "model.norm.weight": (10,),
    f"{LAYER}input_layernorm.weight": (10,),
    f"{LAYER}self_attn.q_proj.bias": (6,),
    f"{LAYER}mlp.gate.weight": (3, 10),
    f"{LAYER}self_attn.v_proj.lora_A.weight": (2, 10),
    f"{LAYER}self_attn.v_proj.lora_B.weight": (6, 2),
}


parameters = partial(random_parameters, MUON | ADAMW)


def muon(weights, **changes):
    return optimizer(weights, Muon, **changes)


def reference(matrix, gradients, *, rate=0.01, decay=0.1, momentum=0.95):
    """The matrix after a step for each gradient: the published algorithm over singular values,
    which the quintic maps one by one."""
    matrix, buffer = np.float64(matrix), np.zeros(matrix.shape)
    for gradient in gradients:
        buffer = momentum * buffer + np.float64(gradient)
        nesterov = np.float64(gradient) + momentum * buffer
        u, s, vt = np.linalg.svd(nesterov, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        update = 0.2 * math.sqrt(max(matrix.shape)) * (u * s) @ vt
        matrix = matrix - rate * decay * matrix - rate * update
    return matrix


def matrices(name, tensor):
    """The matrices of a parameter [..., O, I]; gate and up of an expert are two."""
    tensor = tensor.detach().clone()
    if tensor.dim() == 2:
        return [tensor]
    parts = tensor.chunk(2, 1) if name.endswith("gate_up_proj") else [tensor]
    return [matrix for part in parts for matrix in part]


def test_matrices_of_layers_and_experts_take_the_published_steps():
    weights, gradients = parameters(), {name: [] for name in MUON}
    before = {name: matrices(name, weights[name]) for name in MUON}
    ours = muon(weights)
    for step in range(3):
        set_gradients(step, weights)
        for name in MUON:
            gradients[name].append(matrices(name, weights[name].grad))
        ours.update()
    for name in MUON:
        found, given = matrices(name, weights[name]), zip(*gradients[name], strict=True)
        for matrix, start, own in zip(found, before[name], given, strict=True):
            expected = reference(start.numpy(), [g.numpy() for g in own])
            np.testing.assert_allclose(matrix.numpy(), expected, rtol=0, atol=2e-6)


def test_all_other_parameters_take_the_steps_of_adamw():
    weights, twin = parameters(), parameters()
    ours, adamw = muon(weights), optimizer(twin)
    for step in range(3):
        set_gradients(step, weights, twin)
        ours.update()
        adamw.update()
    after, expected = bits(weights), bits(twin)
    assert {name for name in after if after[name] != expected[name]} == set(MUON)
    moments = {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq", "step") for name in ADAMW}
    assert set(ours.state()) == moments | {f"momentum.{name}" for name in MUON}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("model.layers.0.mlp.up_proj.weight", True),
        ("transformer.h.11.attn.c_attn.weight", True),  # GPT-2
        ("model.decoder.layers.3.fc1.weight", True),  # OPT
        ("model.embed_tokens.weight", False),
        ("transformer.wpe.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
    ],
)
def test_matrices_of_numbered_layers_are_muons_whatever_a_model_calls_them(name, steps):
    assert is_hidden_matrix(name, torch.zeros(2, 3)) == steps
    assert not is_hidden_matrix(name, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reloaded_state_continues_with_the_same_bits(dtype):
    check_reload(lambda: parameters(dtype), Muon)


def test_one_and_two_threads_orthogonalize_to_the_same_bits():
    """torch.optim.Muon does not: its bfloat16 products of a matrix [128, 2560] differ."""
    if numerics.why_not_reproducible():
        pytest.skip("MKL is not in its strict mode")
    noise, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    for shape in [(128, 2560), (700, 300), (33, 77), (1, 50_000)]:
        matrix, found = torch.randn(shape, generator=noise), []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(orthogonalized(matrix))
        torch.set_num_threads(before)
        assert torch.equal(*found), shape


def mapped_on(mesh, names):
    model, ranks = exact_model("qwen3_moe"), ParallelRanks(mesh)
    ranks.divide(model, torch.float32)
    parts = {name: p.detach() for name, p in ranks.trainable(model).items() if name in names}
    seen = []

    def cumulated(name, matrices):
        seen.append(name)
        return matrices.flip(-2).cumsum(-1)

    found = dict(ranks.pieces(model).map_whole(parts, cumulated))
    boxes = ranks.pieces(model).own
    return {name: (boxes[name].slices, part) for name, part in found.items()}, seen


def test_parts_of_every_process_are_those_of_the_mapped_whole():
    """Four processes, of which two and two hold the same rows of q_proj and head, which one of the
    four maps. Of five experts they hold 3, 2, 3 and 2, which they map themselves."""
    weights = exact_model("qwen3_moe").named_weights()
    names = [n for n in weights if n.endswith(("q_proj.weight", "down_proj", "lm_head.weight"))]
    found = on_mesh(mapped_on, names, data=4, shard=2)
    for parts, _ in found:
        for name, (slices, part) in parts.items():
            assert torch.equal(part, weights[name].flip(-2).cumsum(-1)[slices])
    assert [len(parts) for parts, _ in found] == [5, 5, 5, 5]
    seen = [name for _, own in found for name in own]
    assert [seen.count(name) for name in names] == [4 if "experts" in n else 1 for n in names]
