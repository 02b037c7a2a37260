"""Log-softmax over the vocabulary in Triton: whole rows, or the log-prob of one token and the
entropy, and their gradient; float32 inside.

A program owns a row. All kernels compute its sums by one function, `_row_sums`, in blocks of
constant size from token 0. So engine and trainer get the same log-prob, and a row's bits do not
depend on other rows. `vocabulary.py` launches the kernels.
"""

# Code that @triton.jit compiles is not typed Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


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
