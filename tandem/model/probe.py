"""Contract D7: a test of exactness on the machine at hand, at the model's own shapes, before a run.

Two questions. *Parity*: does a token have the same bits in the trainer's packed pass and in the
engine's prefill and decode? *Threads*: do forward and backward pass have the same bits with one
thread and with several? The probe runs every linear, SwiGLU, log-softmax, top-p, sampling and the
attention of the model, at row counts that take different kernels somewhere, and a random model of
the same shapes in a random schedule (schedule.py). It names each operator that differs: two seconds
for 135M parameters and two cores. On a GPU it finds the fastest exact kernel too (`try_matmuls`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.model.attention import Plan, Scoring
from tandem.model.config_file import check_model, first_line
from tandem.model.linear import ExactLinear
from tandem.model.load import ExactModel
from tandem.model.logprobs import chunks, log_distribution
from tandem.model.onednn import padded_rows
from tandem.model.paths import divisible, named_path
from tandem.model.schedule import (
    LONG,
    SHORT,
    VOCABULARY,
    Cache,
    Schedule,
    random_like,
    random_model,
    random_module,
    threads_of,
)
from tandem.runtime import numerics
from tandem.types import SamplingDistribution

# Row counts at which kernels were seen to change, and those around a block of queries.
ROWS = (*SHORT, *LONG)
PACKED_ROWS = 640  # rows of a packed pass
# Of a GPU, whose cuBLAS takes kernels by the count: multiples of 32, powers of two, beside these.
GPU_ROWS = (
    *range(96, PACKED_ROWS + 1, 32),
    *(rows + beside for rows in (1024, 2048, 4096, 8192) for beside in (-1, 0, 1)),
)
FEW_ROWS, MANY_ROWS = 37, 1100
# of gradients of whole linears; up to two microbatches for a part
WHOLE_ROWS: tuple[int, ...] = (FEW_ROWS, 330)
GRADIENT_PRODUCTS = 1 << 27  # at most, of such a part
LENGTH = 400  # past three key blocks, with a partial fourth
SHARERS = (2, 3, 5, 8, 33)  # sequences that read the same pages in decode
DECODE_ROWS = 64  # of a decode step that is timed
LEAST_GAIN = 0.05  # of a kernel's time; less is noise, and would change from start to start
DTYPE_GAIN = 1.2  # of bfloat16's speed over float32's
WIDTHS = range(512, 4097)  # of models that are tried in it: they gain by it, and a layer fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Result of a probe.

    Example: Exactness(parity=["attention by pages: 4 rows"], thread_dependent=[])
    """

    # operators on which engine and trainer differ; empty: they agree to the last bit
    parity: list[str]
    thread_dependent: list[str]  # results whose bits change with the number of threads
    matmul: str = ""  # the kernel that multiplies on a GPU
    inexact: str = ""  # why the model cannot be exact on any machine (model/inexact.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A kernel as it was found here: its time, or why it is not exact or does not run.

    Example: Trial(kernel="cublas", findings=["linear 896 -> 4864: 1 2 rows"])
    """

    kernel: str
    findings: list[str] = field(default_factory=list)
    ms: float = math.inf

    def __str__(self) -> str:
        return f"{self.kernel} ({self.findings[0] if self.findings else f'{self.ms:.2g} ms'})"


def fastest_exact(trials: Sequence[Trial]) -> str:
    """Choose the fastest of the exact kernels; a later one must be faster by LEAST_GAIN. The first
    if none is exact."""
    best = trials[0]
    for trial in trials[1:]:
        faster = trial.ms < (1 - LEAST_GAIN) * best.ms
        if not trial.findings and (best.findings or faster):
            best = trial
    return best.kernel


@lru_cache
def auto_dtype(path: str, threads: int) -> str:
    """Choose model.dtype for a CPU that multiplies bfloat16: that type, where a random model is
    exact in it and DTYPE_GAIN times as fast. The model has layers of the shapes at path. Raises as
    check_model."""
    config = check_model(path, head="value")
    if not divisible(config) or config.hidden_size not in WIDTHS:
        return "float32"
    numerics.prepare()
    lean, kinds = named_path("lean"), (torch.bfloat16, torch.float32)
    with threads_of(threads):
        models = [lean.build(random_module(lean.small(config, 1), 0, kind)) for kind in kinds]
        times = [list(map(_seconds, models)) for _ in range(4)]  # by turns; the first warms up
        narrow, wide = map(min, zip(*times, strict=True))
        found = probe(models[0])
        is_exact = not (found.parity or found.thread_dependent)
    return "bfloat16" if is_exact and DTYPE_GAIN * narrow < wide else "float32"


def _seconds(model: ExactModel) -> float:
    """Time the passes of an update and of the engine over the same tokens."""
    schedule, start = Schedule(model, 0), perf_counter()
    schedule.packed()
    schedule.paged([torch.get_num_threads()])
    return perf_counter() - start


@torch.no_grad()
def try_matmuls(
    model: ExactModel,
    seed: int = 0,
    time_ms: Callable[[Callable[[], Any]], float] | None = None,
    *,
    kernels: Sequence[str] = (),
    microbatch: int = 0,
) -> list[Trial]:
    """Try matmul kernels of the GPU on the model's own linears, in decode and packed; the first one
    stays in use.

    Results must be near those of the first kernel that runs, as a wrong one may be exact too.
    time_ms: None times work in a CUDA graph, as a decode step runs. kernels: () are all.
    microbatch: tokens of an update's pass, whose row count is tried too.
    """
    noise, work = torch.Generator().manual_seed(seed), []
    for (_, inputs), linear in _linears(model).items():
        for rows in (DECODE_ROWS, PACKED_ROWS)[: 1 if linear is model.head else 2]:
            work.append((linear, random_like(model, noise, rows, inputs)))

    def run() -> list[Tensor]:
        return [linear(x) for linear, x in work]

    own = model.kernels
    kernels, trials, expected = kernels or own.matmuls, list[Trial](), list[Tensor]()
    for kernel in kernels:
        own.use_matmul(kernel)
        try:
            results = run()
            expected = expected or results
            if all(map(_is_near, results, expected)):
                noise.manual_seed(seed)
                findings = _linears_differ(model, noise, microbatch)
            else:
                findings = [f"is far from {kernels[0]}"]
            ms = math.inf if findings else (time_ms or own.time_ms)(run)
        except Exception as error:  # it may not be built for this GPU, type or shape
            findings, ms = [first_line(error)], math.inf
        trials.append(Trial(kernel=kernel, findings=findings, ms=ms))
    own.use_matmul(kernels[0])
    return trials


def _is_near(found: Tensor, expected: Tensor) -> bool:
    bound = torch.finfo(found.dtype).eps ** 0.5 * expected.abs().max()
    return bool((found - expected).abs().max() <= bound)


def probe(
    model: ExactModel, seed: int = 0, threads: Sequence[int] = (), microbatch: int = 0
) -> Exactness:
    """Compare engine and trainer on the model's operators and on a random model of its shapes.

    seed: of the random model and its schedule. threads: thread counts to try besides 1 and the
    current one (2 at least). microbatch: tokens of an update's pass, twice as many for gradients.
    """
    noise = torch.Generator().manual_seed(seed)
    counts = sorted({1, max(2, torch.get_num_threads()), *threads})
    unfit, small = numerics.why_not_reproducible(), random_model(model, seed)
    with torch.no_grad():
        parity = _linears_differ(model, noise, microbatch)
        parity += _rowwise_differ(model, noise)
        parity += _attention_differs(small, noise)
        parity += _part_differs(small, named_path(model.path).foreign_parts(small))
    schedule, passes = Schedule(small, seed), []
    for count in counts:
        with threads_of(count):
            passes.append(schedule.packed())
    (logprobs, gradients), *others = passes
    if not torch.equal(schedule.paged(counts), logprobs):
        parity.append("a random model in a random schedule")
    dependent = _gradients_differ(model, noise, counts, microbatch)
    for other_logprobs, other_gradients in others:
        if not torch.equal(logprobs, other_logprobs):
            dependent.append("log-probs of a random model")
        dependent += [
            f"gradient of {name}"
            for name, gradient in gradients.items()
            if not torch.equal(gradient, other_gradients[name])
        ]
    return Exactness(parity=unfit + parity, thread_dependent=unfit + dependent)


def _part_differs(model: ExactModel, parts: dict[str, nn.Module]) -> list[str]:
    """Name the first of a model's parts whose rows differ with the row count."""
    # an expert has the rows of its own tokens
    inside = tuple(f"{n}." for n, part in parts.items() if hasattr(part, "is_transposed"))
    names = {part: name for name, part in parts.items() if not name.startswith(inside)}
    outputs: dict[nn.Module, Tensor] = {}  # in the order in which they are computed

    def keep(part: nn.Module, _: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            outputs[part] = out

    if not parts:
        return []
    hooks = [part.register_forward_hook(keep) for part in names]
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0))

    def run(rows: int) -> dict[nn.Module, Tensor]:
        """Return the outputs of the parts that give one row a token."""
        outputs.clear()
        plan = model.packed_plan(np.array([[0, rows, 0, 0]]))
        model.hidden(tokens[:rows], torch.arange(rows), plan)
        found = {part: out[0] if len(out) == 1 else out for part, out in outputs.items()}
        return {part: out[:rows] for part, out in found.items() if len(out) == padded_rows(rows)}

    try:
        whole = run(LENGTH)
        for rows in ROWS:
            for part, found in run(rows).items():
                if part in whole and not torch.equal(found, whole[part][:rows]):
                    return [f"{names[part]} ({type(part).__name__}): {rows} rows"]
    finally:
        for hook in hooks:
            hook.remove()
    return []


def _linears_differ(model: ExactModel, noise: torch.Generator, microbatch: int) -> list[str]:
    """Name the linears whose rows differ with the row count; a GPU also tries that of a
    microbatch."""
    differing = []
    for (outputs, inputs), linear in _linears(model).items():
        many = {*GPU_ROWS, microbatch} if model.device.type == "cuda" else set()
        if linear is model.head:
            few = model.kernels.head_rows or ROWS
            chunk = chunks(max((PACKED_ROWS, *many)), model.head.weight)[0].stop
            last = {microbatch % chunk} if many else set()
            more = (rows for rows in (many | last) - {*few} if 0 < rows < chunk)
            counts = [*few, *more, max(few[-1] + 1, chunk)]
        else:
            drawn = torch.randint(1, PACKED_ROWS, (3,), generator=noise).tolist()
            counts = [*ROWS, *drawn, PACKED_ROWS, *sorted(many - {0, PACKED_ROWS, *ROWS})]
        counts = model.kernels.distinct(counts, model.dtype)
        x = random_like(model, noise, counts[-1], inputs)
        counts = _differing_counts(linear, x, counts[:-1])
        differing += _findings(f"linear {inputs} -> {outputs}", counts)
    return differing


def _rowwise_differ(model: ExactModel, noise: torch.Generator) -> list[str]:
    """Name which of SwiGLU, log-softmax, top-p and sampling differ with the row count."""
    vocabulary, plain = model.config.vocab_size, SamplingDistribution()
    ranked = min(vocabulary, model.kernels.most_ranked)
    # among tokens so improbable that a sum's last bit moves the edge
    edged = SamplingDistribution(temperature=0.3, top_p=0.999)

    def sampled(x: Tensor) -> Tensor:
        # equal probabilities, and uniforms at their edges: a sum's last bit decides
        uniform = ((x[:, 0].float().abs() % 1.0) * vocabulary).floor() / vocabulary
        table = log_distribution(torch.zeros_like(x, dtype=torch.float32), plain)
        return model.kernels.inverse_cdf(table, uniform)

    operators: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "log-softmax": (lambda x: log_distribution(x.float(), plain), vocabulary),
        "top-p": (lambda x: log_distribution(x.float(), edged), ranked),
        "sampling": (sampled, vocabulary),
    }
    operators |= named_path(model.path).rowwise(model.config)
    differing = []
    for name, (function, width) in operators.items():
        x = random_like(model, noise, 40, width)
        differing += _findings(name, _differing_counts(function, x, SHORT[:-1]))
    return differing


def _differing_counts(
    function: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]
) -> list[int]:
    """Find the counts at which the first or last rows of x alone have other bits than among all.

    Few rows run by turns with one thread, as in a rollout worker, and with the current count.
    """
    whole, differing = function(x), []
    for number, rows in enumerate(counts):
        part = slice(len(x) - rows, None) if number % 4 < 2 else slice(rows)
        with threads_of(1 if number % 2 and rows <= 64 else torch.get_num_threads()):
            if not torch.equal(function(x[part].contiguous()), whole[part]):
                differing.append(rows)
    return differing


def _findings(name: str, counts: Sequence[int]) -> list[str]:
    return [f"{name}: {' '.join(map(str, sorted(set(counts))))} rows"] if counts else []


def _linears(model: ExactModel) -> dict[tuple[int, int], Callable[[Tensor], Tensor]]:
    """Pick one linear of each shape (outputs, inputs), as the layers run them."""
    runs: list[tuple[Any, Sequence[ExactLinear]]] = []
    runs += [*named_path(model.path).linears(model), (model.head, [model.head])]
    weights = [([p.active_part().weight for p in parts], linear) for linear, parts in runs]
    return {(sum(map(len, own)), own[0].shape[1]): linear for own, linear in weights}


def _gradients_differ(
    model: ExactModel, noise: torch.Generator, threads: Sequence[int], microbatch: int
) -> list[str]:
    """Name the linears whose gradients, long sums over outputs or rows, differ with threads."""
    kernels, differing = model.kernels, []
    for (outputs, inputs), linear in _linears(model).items():
        most, whole = max(2 * microbatch, MANY_ROWS), WHOLE_ROWS
        weight = model.head.weight.detach()
        if linear is model.head:  # its gradients are of a chunk of rows at a time
            most, whole = max(FEW_ROWS, chunks(most, weight)[0].stop), (FEW_ROWS,)
        else:
            weight = random_like(model, noise, outputs, inputs)
        drawn = torch.randint(FEW_ROWS, most + 1, (2,), generator=noise).tolist()
        for rows in sorted({*whole, *drawn, most}):
            # threads take parts of a sum sooner if there are fewer columns
            side = max(outputs, inputs) if rows in whole else isqrt(GRADIENT_PRODUCTS // rows)
            part = weight[:side, :side].contiguous()
            above, x = (random_like(model, noise, rows, width) for width in part.shape)
            found = []
            for count in threads:
                with threads_of(count):
                    found += [kernels.gradient_product(above, part)]
                    found += [kernels.weight_gradient(above, x)]
            if not all(map(torch.equal, found[:2] * len(threads), found)):
                differing.append(f"gradient of a linear {inputs} -> {outputs}: {rows} rows")
                break
    return differing


def _attention_differs(model: ExactModel, noise: torch.Generator) -> list[str]:
    """Compare one packed segment with segments behind a prefix, paged prefill and paged decode,
    also of sequences that share their pages."""
    heads, kv_heads, size = model.heads
    q, k, v = (
        random_like(model, noise, LENGTH, count, size) for count in (heads, kv_heads, kv_heads)
    )

    def attended(plan: Plan, rows: slice | list[int]) -> Tensor:
        return plan.attend(cache.layer, q[rows], k[rows], v[rows], Scoring(size**-0.5))

    cache = Cache(model, [LENGTH] * 8, np.random.default_rng(0))
    cache.fill(k, v)
    whole = attended(model.packed_plan(np.array([[0, LENGTH, 0, 0]])), slice(None))
    differing: dict[str, list[int]] = {
        "behind a prefix": [],
        "by pages": [],
        "decode beside others": [],
        "decode from shared pages": [],
    }
    for rows in ROWS:
        start = int(torch.randint(LENGTH - rows, (), generator=noise))
        packed = attended(
            model.packed_plan(np.array([[start, rows, 0, start]])), slice(start + rows)
        )
        plan, _ = cache.plan([0], np.array([start]), np.array([rows]))
        paged = attended(plan, slice(start, start + rows))
        for name, out in (("behind a prefix", packed[start:]), ("by pages", paged)):
            if not torch.equal(out, whole[start : start + rows]):
                differing[name].append(rows)
    for batch in (1, 3, 8):
        for position in (0, 100, 257, LENGTH - 1):
            places = np.array([LENGTH - 1] * (batch - 1) + [position])
            plan, _ = cache.plan(range(batch), places, np.ones(batch, np.int64))
            if not torch.equal(attended(plan, places.tolist())[-1], whole[position]):
                differing["decode beside others"].append(batch)
    for batch in SHARERS:
        places = np.sort(torch.randint(LENGTH, (batch,), generator=noise).numpy())[::-1].copy()
        plan, _ = cache.plan([0] * batch, places, np.ones(batch, np.int64))
        if not torch.equal(attended(plan, places.tolist()), whole[places]):
            differing["decode from shared pages"].append(batch)
    findings = []
    for name, counts in differing.items():
        findings += _findings(f"attention {name}", counts)
    return findings
