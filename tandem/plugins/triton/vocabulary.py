"""Rows over the vocabulary in Triton, float32 inside: log-softmax, the log-prob of one token and
the entropy, and their gradient; the token of a uniform number, and the edge of top-p.

A row is summed in parts of BLOCK tokens from token 0 by programs of their own, and one program
joins its parts: the same two kernels for engine and trainer, for any number of rows. So both get
the same log-prob, and a row's bits do not depend on other rows. Running sums add up a row's blocks
from the first on, so a result depends on no other row and on no address: torch's take other kernels
for other numbers of rows. A row of log-probs needs no normalization there: sums count as shares of
the whole row's. Logits [N, V], of 16 bits or float32, are contiguous. Knows no filters
and no chunks.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _tempered(logits, token, size, temperature):
    """Load logits / temperature, -inf beyond the vocabulary."""
    value = tl.load(logits + token, mask=token < size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(value, temperature)


@triton.jit
def sum_parts_kernel(logits, sums, size, temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Compute a part of a row of tempered logits x in sums [N, 3, BLOCKS]: largest x, then sums of
    w = exp(x - largest) and of w * (x - largest)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = _tempered(logits + row * size, part * BLOCK + tl.arange(0, BLOCK), size, temperature)
    peak = tl.max(value, 0)
    shifted = value - tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(shifted)
    sums += row * 3 * BLOCKS + part
    tl.store(sums, peak)
    tl.store(sums + BLOCKS, tl.sum(weight, 0))
    # a token without probability adds nothing, not 0 * -inf
    tl.store(sums + 2 * BLOCKS, tl.sum(weight * tl.where(weight > 0.0, shifted, 0.0), 0))


@triton.jit
def join_parts_kernel(sums, joined, parts, BLOCKS: tl.constexpr):
    """Compute (largest x, log sum exp(x - largest), mean of x - largest) of a row in joined [N, 3],
    and replace the sums of weights by those of exp(x - largest of the row)."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    sums, joined, there = sums + row * 3 * BLOCKS + part, joined + row * 3, part < parts
    peaks = tl.load(sums, mask=there, other=float("-inf"))
    peak = tl.max(peaks, 0)
    shift = peaks - peak
    share = tl.exp(shift)
    masses = tl.load(sums + BLOCKS, mask=there, other=0.0) * share
    weighted = tl.load(sums + 2 * BLOCKS, mask=there, other=0.0) * share
    weighted = tl.fma(masses, tl.where(share > 0.0, shift, 0.0), weighted)
    mass = tl.sum(masses, 0)
    tl.store(sums + BLOCKS, masses)
    tl.store(joined, peak)
    tl.store(joined + 1, tl.log(mass))
    tl.store(joined + 2, tl.sum(weighted, 0) / mass)


@triton.jit
def _logprob(logits, token, joined, size, temperature):
    """Compute the log-probs of tokens of a row, -inf beyond the vocabulary."""
    return _tempered(logits, token, size, temperature) - tl.load(joined) - tl.load(joined + 1)


@triton.jit
def log_softmax_kernel(logits, joined, out, size, temperature, BLOCK: tl.constexpr):
    """Compute a block of a row of out [N, V], float32."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _logprob(logits + row * size, token, joined + row * 3, size, temperature)
    tl.store(out + row * size + token, value, mask=token < size)


@triton.jit
def token_logprob_kernel(logits, joined, targets, logprobs, entropies, size, temperature):
    """Compute the log-prob of a row's target and, unless entropies is None, the row's entropy."""
    row = tl.program_id(0).to(tl.int64)
    joined, target = joined + row * 3, tl.load(targets + row)
    value = _logprob(logits + row * size, target, joined, size, temperature)
    tl.store(logprobs + row, value)
    if entropies is not None:
        tl.store(entropies + row, tl.load(joined + 1) - tl.load(joined + 2))


@triton.jit
def logprob_slope_kernel(
    logits, joined, targets, above, above_entropy, size, temperature, BLOCK: tl.constexpr
):
    """Write d loss / d logits over a block of a row.

    above and above_entropy, the gradients [N] of log-prob and entropy, may be None.
    """
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits, joined = logits + row * size, joined + row * 3
    logprob = _logprob(logits, token, joined, size, temperature)
    probability = tl.exp(logprob)
    slope = tl.zeros([BLOCK], tl.float32)
    if above is not None:
        hit = (token == tl.load(targets + row)).to(tl.float32)
        slope += tl.load(above + row) * (hit - probability)
    if above_entropy is not None:
        # log p + entropy; a token without probability has no slope, not 0 * -inf
        surprise = tl.where(probability > 0.0, logprob, 0.0) + tl.load(joined + 1)
        slope -= tl.load(above_entropy + row) * probability * (surprise - tl.load(joined + 2))
    slope = tl.div_rn(slope, temperature)
    tl.store(logits + token, slope.to(logits.dtype.element_ty), mask=token < size)


@triton.jit
def _passes(mass, target, REACHING: tl.constexpr):
    if REACHING:
        return (mass >= target) & (mass > 0.0)
    return mass > target


@triton.jit
def find_kernel(
    logits,
    sums,
    joined,
    shares,
    tokens,
    logprobs,
    size,
    temperature,
    REACHING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the first token of a row at which the running sum passes (REACHING: reaches) a share of
    the whole, and its log-prob; it has positive probability.

    The sums of all parts are known, so only one part is read again.
    """
    row = tl.program_id(0).to(tl.int64)
    logits, joined = logits + row * size, joined + row * 3
    within, parts = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    known = parts * BLOCK < size
    masses = tl.load(sums + (row * 3 + 1) * BLOCKS + parts, mask=known, other=0.0)
    ends = tl.cumsum(masses, 0)
    # a share of at most 1 - 2^-24 is rounded to less than the whole, so a part is found
    target = tl.load(shares + row) * tl.max(ends, 0)
    # a GPU's running sum is made of several and may step at a part or token without probability
    passed = _passes(ends, target, REACHING) & (masses > 0.0)
    part = tl.min(tl.where(passed, parts, BLOCKS - 1), 0)
    rest = target - tl.max(tl.where(parts < part, ends, 0.0), 0)
    value = _tempered(logits, part * BLOCK + within, size, temperature)
    probability = tl.exp(value - tl.load(joined))
    passed = _passes(tl.cumsum(probability, 0), rest, REACHING) & (probability > 0.0)
    first = tl.min(tl.where(passed, within, BLOCK), 0)
    # where the running sum's last bits are not those of the part's sum: its last token
    last = tl.max(tl.where(probability > 0.0, within, 0), 0)
    # NaNs pass nothing, and the last part may lie beyond the row
    token = tl.minimum(part * BLOCK + tl.minimum(first, last), size - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, _logprob(logits, token, joined, size, temperature))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Compute the log-probs [N, V], float32, of logits / temperature."""
    logits, _, joined = _sums(logits, temperature)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    log_softmax_kernel[_grid(logits)](
        logits, joined, out, logits.shape[1], temperature, **_tile(logits)
    )
    return out


def target_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (log-probs [N] of targets int64 [N], entropies [N] or None), float32, in nats.

    They are those of softmax(logits / temperature), to the bits of `log_softmax`.
    """
    logits, _, joined = _sums(logits, temperature)
    logprobs = logits.new_empty(len(logits), dtype=torch.float32)
    entropies = torch.empty_like(logprobs) if entropy else None
    token_logprob_kernel[(len(logits),)](
        logits, joined, targets, logprobs, entropies, logits.shape[1], temperature, num_warps=1
    )
    return logprobs, entropies


def logprob_slope(
    logits: Tensor, targets: Tensor, temperature: float, *above: Tensor | None
) -> Tensor:
    """Compute d loss / d logits [N, V] in place of the logits.

    above: the gradients [N] of what `target_logprobs` gives.
    """
    logits, _, joined = _sums(logits, temperature)
    given = (None if grad is None else grad.contiguous() for grad in above)
    logprob_slope_kernel[_grid(logits)](
        logits, joined, targets, *given, logits.shape[1], temperature, **_tile(logits)
    )
    return logits


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample (tokens int64 [N], log-probs float32 [N]) by uniform float32 [N] in [0, 1); the
    likeliest at temperature 0."""
    if temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, target_logprobs(logits, tokens, 1.0, entropy=False)[0]
    return find(logits, temperature, uniform.contiguous(), reaching=False)


def inverse_cdf(table: Tensor, uniform: Tensor) -> Tensor:
    """Find the tokens int64 [N] of uniform float32 [N] in [0, 1) in log-probs float32 [N, V]."""
    return draw(table, 1.0, uniform)[0]


def top_p_edge(ranked: Tensor, top_p: float) -> Tensor:
    """Find the smallest log-prob [N, 1] in the least set of likeliest tokens that reaches top_p.

    ranked: log-probs float32 [N, V], descending.
    """
    shares = ranked.new_full((len(ranked),), top_p)
    return ranked.gather(1, find(ranked, 1.0, shares, reaching=True)[0][:, None])


def find(
    logits: Tensor, temperature: float, shares: Tensor, reaching: bool
) -> tuple[Tensor, Tensor]:
    """Find the first tokens int64 [N] at which the running sums of probabilities pass (reaching:
    reach) shares [N] of the whole, and their log-probs."""
    logits, sums, joined = _sums(logits, temperature)
    logprobs = joined.new_empty(len(logits))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    find_kernel[(len(logits),)](
        *(logits, sums, joined, shares, tokens, logprobs, logits.shape[1], temperature),
        REACHING=reaching,
        BLOCKS=sums.shape[2],
        **_tile(logits),
    )
    return tokens, logprobs


def _sums(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits as the kernels read them, with the sums of their parts and of their rows."""
    logits = logits.contiguous()
    if logits.data_ptr() % 16:  # Triton orders a sum by the alignment that it knows
        logits = logits.clone()
    grid, tile = _grid(logits), _tile(logits)
    blocks = triton.next_power_of_2(grid[1])
    sums = logits.new_empty(len(logits), 3, blocks, dtype=torch.float32)
    joined = sums.new_empty(len(logits), 3)
    sum_parts_kernel[grid](logits, sums, logits.shape[1], temperature, BLOCKS=blocks, **tile)
    join_parts_kernel[(len(logits),)](sums, joined, grid[1], BLOCKS=blocks, num_warps=1)
    return logits, sums, joined


def _grid(logits: Tensor) -> tuple[int, int]:
    return len(logits), triton.cdiv(logits.shape[1], _tile(logits)["BLOCK"])


def _tile(rows: Tensor) -> dict[str, int]:
    """Choose the block by the vocabulary alone."""
    return {"BLOCK": min(BLOCK, triton.next_power_of_2(rows.shape[1])), "num_warps": 8}
