"""vLLM samples the episodes, for `rollout.engine = "vllm"`.

For whom trains on GPUs and wants vLLM's speed. Its kernels are not the trainer's, so a correction
(rl.correction) is required, and the gap of log-probs is measured in every step and bounded.

    backend.py   what the run asks: conflicts, parity, how workers are opened
    worker.py    finds vLLM's interpreter, and starts a rollout worker in it
    engine.py    vLLM's LLMEngine behind the interface of an engine; the one file that imports vllm

It plugs in as `engines: vllm` of tandem/registry.py.
"""

WHERE = "rollout.engine = vllm"  # the setting, in messages
