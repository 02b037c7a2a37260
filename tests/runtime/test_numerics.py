"""Settings of a process before its first product, and none before it asks for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.model.onednn import HAS_PREPACKED
from tandem.runtime import numerics

ROOT = Path(__file__).parents[2]
INTEL = numerics.vendor() == "GenuineIntel" and torch.backends.mkl.is_available()
of_mkl = pytest.mark.skipif(not INTEL, reason="MKL's strict mode is set on Intel processors only")
PREPARE = (
    "from tandem.runtime import numerics; numerics.prepare(); "
    "print(numerics.why_not_reproducible())"
)


def output_of(code, **environment):
    """Run the code in a new process."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MKL_CBWR", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
    } | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_this_process_is_prepared():
    assert numerics.why_not_reproducible() == []


@pytest.fixture
def threads():
    """This process's number of threads; that and its other settings are restored."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def test_prepare_undoes_what_the_caller_had_set(threads):
    """A notebook may have imported torch, and set what it liked."""
    matmul = torch.backends.cuda.matmul
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")
    matmul.allow_bf16_reduced_precision_reduction = True
    assert numerics.prepare(3) == torch.get_num_threads() == 3
    assert torch.tensor([1e-40]) * 0.5 > 0 and torch.get_float32_matmul_precision() == "highest"
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert numerics.prepare(threads) == threads and numerics.why_not_reproducible() == []


@pytest.mark.parametrize("given", ["", ":4096:8"])
def test_cublas_has_a_fixed_workspace_unless_the_caller_has_chosen_one(given, monkeypatch, threads):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    if given:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    numerics.prepare(threads)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":16:8")


@of_mkl
def test_mode_set_too_late_or_otherwise_is_reported():
    late = output_of("import torch; torch.ones(8, 8) @ torch.ones(8, 8); " + PREPARE)
    assert "MKL is not in its strict mode (it computed before the mode was set" in late
    assert "strict mode (MKL_CBWR=AVX2)" in output_of(PREPARE, MKL_CBWR="AVX2")


ROWS = """
import torch
from tandem.runtime import numerics
numerics.prepare()
noise = torch.Generator().manual_seed(0)
q, k = torch.randn(3, 2, 64, 128, generator=noise), torch.randn(3, 2, 64, 128, generator=noise)
by_token, by_element = k.transpose(-1, -2), k.transpose(-1, -2).contiguous()
full = q @ by_token
parts = [
    q[:, :, :rows].contiguous() @ keys
    for rows in (4, 8, 20, 32) for keys in (by_token, by_element)
]
print(all(torch.equal(part, full[:, :, : part.shape[2]]) for part in parts))
"""


@of_mkl
@pytest.mark.parametrize(("prepares", "equal"), [("numerics.prepare()", "True"), ("", "False")])
def test_products_of_any_rows_and_key_layout_are_equal(prepares, equal):
    """Without the strict mode they have not, which is the reason for it: seen at MKL's switch for a
    laptop without AVX-512."""
    assert (
        output_of(ROWS.replace("numerics.prepare()", prepares), MKL_ENABLE_INSTRUCTIONS="AVX2")
        == equal
    )


def test_environment_gives_one_thread_and_the_same_mode():
    environment = numerics.environment()
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert ("MKL_CBWR" in environment) == (numerics.vendor() == "GenuineIntel")
    code = (
        "from tandem.runtime import numerics; import torch; "
        "print(numerics.why_not_reproducible(), torch.get_num_threads()); "
        "print(numerics.processor())"
    )
    lines = output_of(code, **environment, ONEDNN_MAX_CPU_ISA="AVX2").splitlines()
    assert lines[0] == "[] 1"
    assert lines[1].startswith(numerics.processor().partition(",")[0])
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in lines[1]


KERNELS = """
import resource
import torch
from tandem.model.onednn import gradient_product
from tandem.runtime import numerics
numerics.prepare()
multiply, weight = torch.ops.mkldnn._linear_pointwise, torch.ones(16, 16)
def peak(counts):
    for rows in counts:
        PRODUCT
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(peak(range(500, 700)), peak(range(700, 1200)))
"""
ROUNDED = "gradient_product(torch.ones(rows, 16), weight)"
EVERY_COUNT = "multiply(torch.ones(rows, 16), weight, None, 'none', [], '')"


@pytest.mark.skipif(not HAS_PREPACKED, reason="without oneDNN nothing is compiled")
@pytest.mark.parametrize(
    ("product", "kept"), [(EVERY_COUNT, {}), (ROUNDED, dict.fromkeys(numerics.KERNELS, "1024"))]
)
def test_kernels_of_many_row_counts_take_little_memory(product, kept):
    """Unbounded 500 counts took 260 MiB; rows of gradients are rounded to few counts besides."""
    early, late = map(int, output_of(KERNELS.replace("PRODUCT", product), **kept).split())
    assert late - early < 60
