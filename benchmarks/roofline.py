"""Lower bounds of times, computed from the ceilings measured in the same run (machine.ceilings)."""


def decode_floor(
    batch: int,
    *,
    parameters: int,
    context: float,
    kv_bytes_per_token: int,
    read_gb_s: float,
    gemm_gflops: float,
) -> float:
    """tok/s that no engine can pass. A step reads every weight and every cached key and value once
    and does 2 FLOPs a weight and sequence:

        step >= max(4 bytes x parameters / bandwidth, 2 x parameters x batch / GEMM peak)
                + batch x context x bytes a token / bandwidth
    """
    weights = max(4 * parameters / read_gb_s / 1e9, 2 * parameters * batch / gemm_gflops / 1e9)
    return batch / (weights + batch * context * kv_bytes_per_token / read_gb_s / 1e9)


def prefill_floor(tokens: int, *, parameters: int, head: int, gemm_gflops: float) -> float:
    """Seconds: 2 FLOPs a weight and token, the output projection (head parameters) left out but for
    the last token."""
    return 2 * tokens * (parameters - head) / gemm_gflops / 1e9
