"""Products of gradients by oneDNN (tandem/model/onednn.py) beside torch's own, one thread and two.

python benchmarks/gradient_products.py            milliseconds, the median of 21
python benchmarks/gradient_products.py threads    how many products have other bits with other threads
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import machine

from tandem.model.onednn import gradient_product, weight_gradient

ROWS, REPEATS = (1100, 4160), 21
SHAPES = ((576, 576), (3072, 576), (576, 1536), (512, 128), (96, 96))  # outputs, inputs
MANY_ROWS, THREADS = (32, 256, 512, 1100, 4096), (1, 2, 3, 4, 6, 8, 16)
VOCABULARY = (49152, 64)


def main(what: str = "") -> None:
    print(machine.describe())
    if what == "threads":
        cases = [(*shape, rows) for shape in SHAPES for rows in MANY_ROWS]
        cases += [(*VOCABULARY, rows) for rows in MANY_ROWS[:3]]
        differing = [case for case in cases if differs(*case)]
        print(f"{len(differing)} of {len(cases)} differ: {differing}")
        return
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for (outputs, inputs), rows in product(SHAPES, ROWS):
            ratios = compare(outputs, inputs, rows)
            print(f"{threads} threads, {rows} rows, {inputs} -> {outputs}, gradient of", ratios)


def compare(outputs: int, inputs: int, rows: int) -> str:
    """Measure both gradients; that of the weights also where above is a slice, as in fused linears."""
    weight, x, above = drawn(outputs, inputs, rows)
    part = torch.cat([above, above], 1)[:, :outputs]
    pairs = {
        "inputs": (partial(torch.matmul, above, weight), partial(gradient_product, above, weight)),
        "weights": (partial(torch.matmul, above.t(), x), partial(weight_gradient, above, x)),
        "sliced": (partial(torch.matmul, part.t(), x), partial(weight_gradient, part, x)),
    }
    texts = []
    for name, pair in pairs.items():
        theirs, ours = (milliseconds(run) for run in pair)
        texts.append(f"{name}: {theirs:.2f} / {ours:.2f} ms, {theirs / ours:.2f}x")
    return "; ".join(texts)


def drawn(outputs: int, inputs: int, rows: int) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(0)
    shapes = (outputs, inputs), (rows, inputs), (rows, outputs)
    return tuple(torch.randn(shape, generator=noise) for shape in shapes)


def differs(outputs: int, inputs: int, rows: int) -> bool:
    weight, x, above = drawn(outputs, inputs, rows)
    found = []
    for count in THREADS:
        torch.set_num_threads(count)
        found.append((gradient_product(above, weight), weight_gradient(above, x)))
    return not all(map(torch.equal, found[0] * len(found), [t for pair in found for t in pair]))


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


if __name__ == "__main__":
    main(*sys.argv[1:])
