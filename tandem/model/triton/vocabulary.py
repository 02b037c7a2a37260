"""Rows over the vocabulary in Triton, float32 inside: log-softmax, the log-prob of one token and
the entropy, and their gradient; the token of a uniform number, and the edge of top-p.

A program owns a row. All log-probs come of one function, `_row_sums`, in blocks of constant size
from token 0: so engine and trainer get the same log-prob, and a row's bits do not depend on other
rows. Running sums add up a row's blocks from the first on, so a result depends on no other row and
on no address: torch's take other kernels for other numbers of rows. A row of log-probs needs no
normalization there: sums count as shares of the whole row's. Logits [N, V] are contiguous within a
row. Knows no filters and no chunks.
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
def _row_sums(logits, size, temperature, BLOCK: tl.constexpr):
    """Compute (largest x, log sum exp(x - largest), mean of x - largest) of a row of tempered
    logits x."""
    tokens = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, size, BLOCK):
        highest = tl.maximum(highest, _tempered(logits, base + tokens, size, temperature))
    peak = tl.max(highest, 0)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for base in range(0, size, BLOCK):
        shifted = _tempered(logits, base + tokens, size, temperature) - peak
        weight = tl.exp(shifted)
        total += weight
        # a token without probability adds nothing, not 0 * -inf
        weighted = tl.fma(weight, tl.where(weight > 0.0, shifted, 0.0), weighted)
    mass = tl.sum(total, 0)
    return peak, tl.log(mass), tl.sum(weighted, 0) / mass


@triton.jit
def log_softmax_kernel(logits, out, size, stride, temperature, BLOCK: tl.constexpr):
    """Compute a row of out [N, V], float32."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak, log_mass, _ = _row_sums(logits, size, temperature, BLOCK)
    for base in range(0, size, BLOCK):
        token = base + tl.arange(0, BLOCK)
        value = _tempered(logits, token, size, temperature) - peak - log_mass
        tl.store(out + row * size + token, value, mask=token < size)


@triton.jit
def token_logprob_kernel(
    logits, targets, logprobs, entropies, size, stride, temperature, BLOCK: tl.constexpr
):
    """Compute the log-prob of a row's target and, unless entropies is None, the row's entropy."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak, log_mass, mean = _row_sums(logits, size, temperature, BLOCK)
    target = tl.load(targets + row)
    tl.store(logprobs + row, _tempered(logits, target, size, temperature) - peak - log_mass)
    if entropies is not None:
        tl.store(entropies + row, log_mass - mean)


@triton.jit
def logprob_slope_kernel(
    logits, targets, above, above_entropy, slope, size, stride, temperature, BLOCK: tl.constexpr
):
    """Compute a row of slope [N, V], d loss / d tempered logits.

    above and above_entropy, the gradients [N] of log-prob and entropy, may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak, log_mass, mean = _row_sums(logits, size, temperature, BLOCK)
    target = tl.load(targets + row)
    for base in range(0, size, BLOCK):
        token = base + tl.arange(0, BLOCK)
        logprob = _tempered(logits, token, size, temperature) - peak - log_mass
        probability = tl.exp(logprob)
        result = tl.zeros([BLOCK], tl.float32)
        if above is not None:
            result += tl.load(above + row) * ((token == target).to(tl.float32) - probability)
        if above_entropy is not None:
            # log p + entropy; a token without probability has no slope, not 0 * -inf
            surprise = tl.where(probability > 0.0, logprob, 0.0) + log_mass - mean
            result -= tl.load(above_entropy + row) * probability * surprise
        tl.store(slope + row * size + token, result.to(slope.dtype.element_ty), mask=token < size)


@triton.jit
def _probabilities(logprobs, place, size):
    """Load log-probs and exponentiate them, 0 beyond the row."""
    return tl.exp(tl.load(logprobs + place, mask=place < size, other=float("-inf")))


@triton.jit
def _passes(mass, target, REACHING: tl.constexpr):
    if REACHING:
        return mass >= target
    return mass > target


@triton.jit
def _find(logprobs, size, share, REACHING: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Find the first place of a row at which the running sum passes (REACHING: reaches) `share` of
    the whole; it has positive probability.

    The sums of all blocks stay in registers, so only one block is read again.
    """
    within, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    total, ends = 0.0, tl.zeros([BLOCKS], tl.float32)
    for block in range(tl.cdiv(size, BLOCK)):
        total += tl.sum(_probabilities(logprobs, block * BLOCK + within, size), 0)
        ends = tl.where(blocks >= block, total, ends)
    target = share * total
    # a share of at most 1 - 2^-24 is rounded to less than the whole, so a block is found
    block = tl.min(tl.where(_passes(ends, target, REACHING), blocks, BLOCKS - 1), 0)
    rest = target - tl.max(tl.where(blocks < block, ends, 0.0), 0)
    probability = _probabilities(logprobs, block * BLOCK + within, size)
    # a GPU's running sum is made of several and may step at a token without probability
    passed = _passes(tl.cumsum(probability, 0), rest, REACHING) & (probability > 0.0)
    first = tl.min(tl.where(passed, within, BLOCK), 0)
    # where the running sum's last bits are not those of the block's sum: its last token
    last = tl.max(tl.where(probability > 0.0, within, 0), 0)
    # NaNs pass nothing, and the last block may lie beyond the row
    return tl.minimum(block * BLOCK + tl.minimum(first, last), size - 1)


@triton.jit
def inverse_cdf_kernel(logprobs, uniform, tokens, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Compute the token whose slice of the cumulative distribution holds a row's uniform."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(uniform + row)
    token = _find(logprobs + row * size, size, share, False, BLOCK, BLOCKS)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def top_p_edge_kernel(ranked, edges, size, top_p, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Compute the smallest log-prob in the least set of a row's likeliest that reaches top_p.

    ranked are log-probs, descending.
    """
    row = tl.program_id(0).to(tl.int64)
    ranked += row * size
    place = _find(ranked, size, top_p, True, BLOCK, BLOCKS)
    tl.store(edges + row, tl.load(ranked + place))


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Compute the log-probs [N, V], float32, of logits / temperature."""
    logits = _aligned(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    log_softmax_kernel[(len(logits),)](logits, out, *_shape(logits, temperature), **_tile(logits))
    return out


def target_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (log-probs [N] of targets int64 [N], entropies [N] or None), float32, in nats.

    They are those of softmax(logits / temperature), to the bits of `log_softmax`.
    """
    logits = _aligned(logits)
    logprobs = logits.new_empty(len(logits), dtype=torch.float32)
    entropies = torch.empty_like(logprobs) if entropy else None
    token_logprob_kernel[(len(logits),)](
        logits, targets, logprobs, entropies, *_shape(logits, temperature), **_tile(logits)
    )
    return logprobs, entropies


def logprob_slope(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    above: Tensor | None,
    above_entropy: Tensor | None,
) -> Tensor:
    """Compute d loss / d (logits / temperature) [N, V], float32.

    above and above_entropy [N] are the gradients of `target_logprobs`.
    """
    logits = _aligned(logits)
    slope = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    above, above_entropy = (
        None if grad is None else grad.contiguous() for grad in (above, above_entropy)
    )
    logprob_slope_kernel[(len(logits),)](
        logits, targets, above, above_entropy, slope, *_shape(logits, temperature), **_tile(logits)
    )
    return slope


def inverse_cdf(table: Tensor, uniform: Tensor) -> Tensor:
    """Find the tokens int64 [N] of uniform float32 [N] in [0, 1) in log-probs float32 [N, V]."""
    table = _aligned(table.contiguous())
    tokens = torch.empty(len(table), dtype=torch.int64, device=table.device)
    inverse_cdf_kernel[(len(table),)](
        table, uniform.contiguous(), tokens, table.shape[1], **_tiles(table)
    )
    return tokens


def top_p_edge(ranked: Tensor, top_p: float) -> Tensor:
    """Find the smallest log-prob [N, 1] in the least set of likeliest tokens that reaches top_p.

    ranked: log-probs float32 [N, V], descending.
    """
    ranked = _aligned(ranked.contiguous())
    edges = ranked.new_empty(len(ranked), 1)
    top_p_edge_kernel[(len(ranked),)](ranked, edges, ranked.shape[1], top_p, **_tiles(ranked))
    return edges


def _shape(logits: Tensor, temperature: float) -> tuple[int, int, float]:
    return logits.shape[1], logits.stride(0), temperature


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows unless they begin at a multiple of 16 bytes: Triton orders a sum by the alignment
    that it knows."""
    return rows.clone() if rows.data_ptr() % 16 else rows


def _tile(rows: Tensor) -> dict[str, int]:
    """Choose the block by the vocabulary alone."""
    return {"BLOCK": min(BLOCK, triton.next_power_of_2(rows.shape[1])), "num_warps": 8}


def _tiles(rows: Tensor) -> dict[str, int]:
    """Choose the block, and how many there may be."""
    tile = _tile(rows)
    return tile | {"BLOCKS": triton.next_power_of_2(triton.cdiv(rows.shape[1], tile["BLOCK"]))}
