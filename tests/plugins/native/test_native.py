"""The compiled kernels against the plain ones and torch's gradients, and the bits of their rows."""

import hashlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.model.attention import Scoring
from tandem.model.kernels import CPU as PLAIN
from tandem.model.kernels import Kernels
from tandem.model.layers import rotation_of
from tandem.model.paged_attention import Runs
from tandem.model.quantized import quantize
from tandem.model.schedule import threads_of
from tandem.plugins.native import fused
from tandem.plugins.native.fused import CPU
from tandem.runtime.errors import UserError
from tests.support.tiny import exact_model, noise

pytestmark = pytest.mark.skipif(CPU is PLAIN, reason="the kernels are not compiled here")

SEGMENTS = np.array(
    [[0, 20, 0, 0], [20, 300, 0, 20], [320, 30, 0, 20], [350, 40, 0, 0], [390, 7, 350, 40]]
)
ROWS = 400  # three of them in no segment
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def near(found, expected, dtype):
    bound = (2e-6 if dtype == torch.float32 else 1e-2) * expected.float().abs().max()
    return (found.float() - expected.float()).abs().max() <= bound


def both(operator, *inputs):
    """Results and gradients of an operator of both sets of kernels, for the same inputs."""
    made = []
    for kernels in (CPU, PLAIN):
        own = [t.clone().requires_grad_() for t in inputs]
        out = operator(kernels, *own)
        out.backward(noise(*out.shape, dtype=out.dtype, seed=9))
        with torch.no_grad():
            assert torch.equal(operator(kernels, *own), out)
        made.append((out.detach(), *(t.grad for t in own)))
    return zip(*made, strict=True)


@TYPES
@pytest.mark.parametrize("width", [50, 64])
def test_row_kernels_are_near_the_plain_ones_with_their_gradients(width, dtype):
    angle = noise(7, 1, width // 2)
    cosine = torch.cat([angle.cos(), angle.cos()], -1).to(dtype)
    sine = torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    x, weight = noise(7, 3, width, dtype=dtype), noise(width, dtype=dtype, seed=1)
    for found, expected in (
        *both(lambda kernels, x, w: kernels.rms_norm(x, w, 1e-5), x, weight),
        *both(lambda kernels, x: kernels.rotate(x, (cosine, sine)), x),
        *both(lambda kernels, x: kernels.swiglu(x.flatten(0, 1)), x),
    ):
        assert near(found, expected, dtype)
    with torch.no_grad():
        total, out = CPU.add_rms_norm(x, x * 3, weight, 1e-5)
        assert torch.equal(total, x + x * 3)
        assert torch.equal(out, CPU.rms_norm(total, weight, 1e-5))


@TYPES
@pytest.mark.parametrize("size", [48, 64])
@pytest.mark.parametrize(
    "scoring", [{}, {"window": 10}, {"softcap": 5.0}, {"sinks": noise(6)}], ids=str
)
def test_packed_attention_is_near_the_plain_one_with_its_gradients(scoring, size, dtype):
    sides = [noise(ROWS, heads, size, dtype=dtype, seed=heads) for heads in (6, 2, 3)]
    sides[2] = sides[2][:, :2]  # rows apart

    def attend(kernels, *given):
        plan = kernels.packed_plan(SEGMENTS, torch.device("cpu"), 6, 2)
        names = {"sinks": given[3]} if len(given) > 3 else scoring
        return plan.attend(0, *given[:3], Scoring(0.125, **names))

    inputs = [*sides, *(t for name, t in scoring.items() if name == "sinks")]
    for found, expected in both(attend, *inputs):
        assert near(found, expected, dtype)


@TYPES
def test_a_linear_has_the_bits_of_its_row_alone_for_any_threads(dtype):
    for outputs, inputs in ((97, 33), (960, 576), (64, 1100)):
        x, weight = noise(2100, inputs, dtype=dtype), noise(outputs, inputs, dtype=dtype, seed=1)
        whole = CPU.matmul(x, packed := CPU.pack(weight), weight[:, 0])
        assert near(whole, x.double() @ weight.double().t() + weight[:, 0], dtype)
        for rows in (1, 2, 4, 6, 7, 13, 16, 17, 36, 37):
            assert torch.equal(CPU.matmul(x[-rows:], packed, weight[:, 0]), whole[-rows:])


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (75, 33, 97), (130, 2100, 576)])
def test_gradients_of_a_linear_are_near_those_of_float64(rows, inner, columns):
    above, weight, x = noise(rows, inner), noise(inner, columns, seed=1), noise(rows, columns)
    product = CPU.gradient_product(above, weight)
    assert near(product, above.double() @ weight.double(), torch.float32)
    expected = above.double().t() @ x.double()
    assert near(CPU.weight_gradient(above, x), expected, torch.float32)
    added = CPU.weight_gradient(above, x, torch.ones(inner, columns))
    assert near(added, expected + 1, torch.float32)


def test_the_vocabulary_of_engine_and_trainer_has_one_set_of_bits():
    logits, targets = 5 * noise(9, 1000), torch.arange(9) * 100
    table = CPU.log_softmax(logits, 0.7)
    logprobs, entropies = CPU.target_logprobs(logits, targets, 0.7, entropy=True)
    assert torch.equal(logprobs, table.gather(1, targets[:, None])[:, 0])
    wide = logits.double().requires_grad_()
    exact = (wide / 0.7).log_softmax(-1)
    entropy = -(exact * exact.exp()).sum(-1)
    assert near(table, exact, torch.float32) and near(entropies, entropy, torch.float32)
    above, of_entropy = noise(9, seed=1), noise(9, seed=2)
    chosen = exact.gather(1, targets[:, None])[:, 0]
    (chosen @ above.double() + entropy @ of_entropy.double()).backward()
    slope = CPU.logprob_slope(logits.clone(), targets, 0.7, above, of_entropy)
    assert near(slope / 0.7, wide.grad, torch.float32)
    uniform = torch.rand(9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(CPU.inverse_cdf(table, uniform), PLAIN.inverse_cdf(table, uniform))
    filtered = table.masked_fill(table < -4, -math.inf)
    drawn = CPU.inverse_cdf(filtered, torch.full((9,), 1 - 2**-24))
    assert filtered.gather(1, drawn[:, None]).isfinite().all()


def digest():
    """Hash what is computed, without pages (they have packed bits) and products in bfloat16."""
    made = []
    for dtype, size in ((torch.float32, 64), (torch.float32, 48), (torch.bfloat16, 48)):
        q, k, v = (noise(ROWS, n, size, dtype=dtype, seed=n).requires_grad_() for n in (6, 2, 3))
        plan = CPU.packed_plan(SEGMENTS, torch.device("cpu"), 6, 2)
        out = plan.attend(0, q, k, v[:, :2], Scoring(0.125, window=size, softcap=5.0))
        turn = noise(ROWS, 1, size, dtype=dtype), noise(ROWS, 1, size, dtype=dtype, seed=1)
        inner = CPU.swiglu(CPU.rotate(out, turn).flatten(1)[:, :100])
        x = CPU.rms_norm(inner, noise(50, dtype=dtype), 1e-5)
        x.square().sum().backward()
        x = x.detach()
        logits = CPU.matmul(x.float(), CPU.pack(noise(1000, 50)))
        made += [x, q.grad, k.grad, v.grad, logits, CPU.weight_gradient(logits, x.float())]
        made += [CPU.gradient_product(logits, noise(1000, 50)), CPU.log_softmax(logits, 1.0)]
        made += CPU.target_logprobs(logits, torch.arange(ROWS), 0.7, entropy=True)
    return hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in made)).hexdigest()


@pytest.mark.skipif(not shutil.which("objdump"), reason="binutils are not here")
@pytest.mark.parametrize("panel", ["avx2::panel<6, float>", "avx512::panel<14, float>"])
def test_a_product_sums_in_registers(panel):
    """GCC keeps a vector wider than a register in memory, and says nothing."""
    [library] = Path(fused.__file__).parent.glob("compiled*.so")
    code = subprocess.check_output(["objdump", "-dC", library], text=True)
    [own] = [part for part in code.split("\n\n") if f"{panel}(" in part.partition("\n")[0]]
    sums = [line for line in own.splitlines() if "vfmadd" in line]
    assert sums and not any("(%rsp)" in line for line in sums)


def test_threads_and_instruction_sets_have_the_same_bits():
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    program = "from tests.plugins.native.test_native import digest; print(digest())"
    command = [sys.executable, "-c", program]
    digests = {subprocess.check_output(command, env=environment, text=True).strip()}
    for threads in (1, 2):
        with threads_of(threads):
            digests.add(digest())
    assert len(digests) == 1


def test_kernels_that_are_not_here_are_refused_by_name():
    with pytest.raises(UserError, match="the fused kernels are not on this machine"):
        Kernels().use_matmul("fused")
    CPU.use_matmul("cublas")  # of a trainer on a GPU
    assert exact_model("llama").kernels is CPU


def test_a_page_of_keys_is_read_as_the_packed_pass_reads_them():
    """Also with values that a page kept from before, which may be anything."""
    q, k, v = (noise(260, heads, 64, seed=heads) for heads in (6, 2, 3))
    v, scoring = v[:, :2].contiguous(), Scoring(0.125, window=200)
    keys, values = ([torch.full((3, 2, 128, 64), math.nan)] for _ in range(2))
    whole = CPU.packed_plan(np.array([[0, 260, 0, 0]]), torch.device("cpu"), 6, 2)
    with torch.no_grad():
        expected = whole.attend(0, q, k, v, scoring)
        for start, count in ((0, 100), (100, 159), (259, 1)):
            runs = Runs([[2, 0, 1]], np.array([start]), np.array([count]))
            rows = slice(start, start + count)
            plan = CPU.paged_plan(keys, values, runs, 6)
            assert torch.equal(plan.attend(0, q[rows], k[rows], v[rows], scoring), expected[rows])


@TYPES
@pytest.mark.parametrize("kind", ["llama", "qwen2 half windowed", "qwen3", "mistral"])
def test_layers_in_one_call_have_the_bits_of_one_after_another(kind, dtype):
    model = exact_model(kind, **({"attention_bias": True} if kind == "llama" else {})).to(dtype)
    count, (heads, kv_heads, size) = 2, model.heads
    rounds = []

    @torch.no_grad()
    def run(kernels):
        pages = [torch.zeros(3, kv_heads, 128, size, dtype=dtype) for _ in range(2 * count)]
        made = []
        for start, rows in ((0, 150), (150, 1), (151, 7)):
            runs = Runs([[2, 0]], np.array([start]), np.array([rows]))
            plan = CPU.paged_plan(pages[:count], pages[count:], runs, heads)
            x = noise(rows, 96, dtype=dtype, seed=start)
            turn = rotation_of(model.module.model.rotary_emb, x, torch.from_numpy(runs.positions))
            made += [kernels.run_layers(model, x, turn, plan, None), *map(torch.clone, pages)]
        return made

    for _ in range(2):  # also after a weight has changed
        rounds.append(run(CPU))
        assert all(map(torch.equal, rounds[-1], run(PLAIN)))
        assert CPU._table_of(model, dtype) is not None
        with torch.no_grad():
            model.module.model.layers[1].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(rounds[0][0], rounds[1][0])


def test_what_the_plain_kernels_take_or_refuse_the_compiled_ones_do_too():
    [noise(8, 4).fill_(math.nan) for _ in range(99)]  # memory that is given again
    assert not CPU.weight_gradient(torch.empty(0, 8), torch.empty(0, 4)).any()
    quantized, x = quantize(noise(64, 64), "int8"), noise(3, 64)
    assert near(CPU.gradient_product(x, quantized), x @ quantized.numbers(), torch.float32)
    broken = noise(2, 40).index_fill(1, torch.tensor([3]), math.nan)
    assert torch.cat(CPU.target_logprobs(broken, torch.arange(2), 1.0, entropy=True)).isnan().all()
    assert (CPU.inverse_cdf(broken.log_softmax(-1), torch.rand(2)) < -40).all()
    with pytest.raises(IndexError, match="not in the vocabulary"):
        CPU.target_logprobs(noise(1, 40), torch.tensor([40]), 1.0, entropy=False)
    sinks = torch.full((6,), 300.0, requires_grad=True)
    q, k, v = (noise(ROWS, heads, 64).requires_grad_() for heads in (6, 2, 2))
    plan = CPU.packed_plan(SEGMENTS, torch.device("cpu"), 6, 2)
    plan.attend(0, q, k, v, Scoring(0.125, sinks=sinks)).sum().backward()
    assert not sinks.grad.any() and not q.grad.any()
