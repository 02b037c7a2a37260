"""Time of a decode step by operator, from torch's profiler.

    python benchmarks/step_profile.py MODEL_DIR BATCH

with prompts of 64 tokens; prints ms a step, whole and by operator.
"""

import statistics
import sys
import time

import numpy as np
from torch.profiler import profile

from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.jobs.engines import prepare_process
from tandem.model.load import load_model
from tandem.types import Request, SamplingParams

STEPS = 10


def main() -> None:
    path, batch = sys.argv[1], int(sys.argv[2])
    prepare_process(Config())
    engine = Engine(load_model(path), lambda tokens: "", cache_bytes=1 << 30, max_batch=batch)
    for key, prompt in enumerate(np.random.default_rng(0).integers(0, 1000, (batch, 64))):
        engine.submit(Request(key=key, prompt=prompt, params=SamplingParams(max_new_tokens=64)))
    seconds = []
    for _ in range(5 + STEPS):  # the first ones prefill and warm up
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    print(f"batch {batch}: {statistics.median(seconds[5:]) * 1e3:.1f} ms a step")
    with profile() as record:
        for _ in range(STEPS):
            engine.step()
    for operator in sorted(record.key_averages(), key=lambda event: -event.self_cpu_time_total)[
        :16
    ]:
        ms = operator.self_cpu_time_total / 1e3 / STEPS
        print(f"{operator.key:32} {ms:7.2f} ms, {operator.count / STEPS:.0f} calls")


if __name__ == "__main__":
    main()
