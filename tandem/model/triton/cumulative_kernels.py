"""Running sums of probabilities along a row in Triton: the token of a uniform number, and the edge
of top-p.

A program owns a row and adds up its blocks from the first on, so a result depends on no other row
and on no address: torch's sums and running sums on a GPU take other kernels for other numbers of
rows. `cumulative.py` launches the kernels.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


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
