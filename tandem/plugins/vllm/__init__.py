"""vLLM samples the episodes, for `rollout.engine = "vllm"`.

For anyone who trains on GPUs and wants vLLM's speed. Its kernels are not the trainer's, so a
run needs rl.correction, and every step measures the gap of log-probs and bounds it.

    backend.py   what the run asks: conflicts, parity, how workers are opened
    worker.py    finds vLLM's interpreter, and starts a rollout worker in it
    engine.py    vLLM's LLMEngine behind the interface of an engine; the one file that imports vllm

It plugs in as `engines: vllm` of tandem/registry.py.
"""

WHERE = "rollout.engine = vllm"  # the setting, in messages
MOST_BIASED = 1024  # ids, by vLLM's newer runner; it allows no longer list of allowed ids either


def bias(named: int, rows: int) -> dict[int, float] | None:
    """Give the rows of a vocabulary that have no token the trainer's logit of them. named: how many
    rows have one; 0: all."""
    from tandem.model.logprobs import UNNAMED

    return dict.fromkeys(range(named or rows, rows)[:MOST_BIASED], UNNAMED) or None
