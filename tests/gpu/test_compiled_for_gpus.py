"""Every kernel compiles to machine code for the GPUs that Tandem names, without one.

It shows that types, shapes and shared memory are right for the compiler; what the code computes
only a GPU can show.
"""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from triton import knobs

ROOT = Path(__file__).parents[2]
KERNELS = {
    node.name
    for path in (ROOT / "tandem/plugins/triton").glob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
}
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of a block: 163 KiB, 227 KiB
CAPABILITIES = tuple(SHARED_BYTES)
# where the scores of a tile are: after mma.sync, wgmma, tcgen05 in registers that hold 32 keys
MATRIX_LAYOUTS = {80: "versionMajor = 2", 90: "versionMajor = 3", 100: "#ttg.linear"}


@cache
def compiled(folder):
    """Rows of the program that compiles, once for all tests."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", *map(str, CAPABILITIES)],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability, dtype, tmp_path_factory):
    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    if not Path(tool.path).exists():
        pytest.skip(f"this build of triton has no assembler for compute capability {capability}")
    rows = compiled(tmp_path_factory.getbasetemp() / "kernels")
    mine = [row for row in rows if (row["capability"], row["dtype"]) == (capability, dtype)]
    assert len(KERNELS) >= 18 and {row["kernel"] for row in mine} == KERNELS
    assert all(row["bytes"] > 0 for row in mine)
    assert max(row["shared"] for row in mine) <= SHARED_BYTES[capability]
    alone, with_rotation = mine[0]["norms"]
    assert alone == with_rotation and alone
    # decode, prefill and trainer: one matrix instruction, and one order of a row's sum
    (layouts, ahead), (split_layouts, split_ahead) = mine[0]["attention"]
    assert len(layouts) == 1 and layouts == split_layouts
    if dtype == "bfloat16":
        assert ahead == split_ahead == [2]  # keys and values of the next block
        assert MATRIX_LAYOUTS[capability] in layouts[0]
    if dtype == "bfloat16" and capability >= 90:
        spilled = [row for row in mine if row["stack"] and row["width"] == 128]
        # of the loop over splits, not of the one over keys inside of it
        assert {row["kernel"] for row in spilled} <= {"attend_kernel"}
        assert max((row["stack"] for row in spilled), default=0) <= 128


@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 128), ("float32", 256), ("bfloat16", 256)]
)
def test_attention_over_wide_heads_fits_the_shared_memory_of_the_smallest_gpu(
    dtype, width, tmp_path_factory
):
    if not Path(knobs.nvidia.ptxas.path).exists():
        pytest.skip("this build of triton has no assembler")
    rows = compiled(tmp_path_factory.getbasetemp() / "kernels")
    mine = [row for row in rows if (row["dtype"], row["width"]) == (dtype, width)]
    attend = [row for row in mine if row["kernel"].startswith("attend_")]
    assert {row["kernel"] for row in attend} == {"attend_kernel", "attend_split_kernel"}
    assert max(row["shared"] for row in attend) <= min(SHARED_BYTES.values())
