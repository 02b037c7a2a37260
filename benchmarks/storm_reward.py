"""The reward function of storm.py, with TRL's signature: honest work of a known cost, or the harm
its completion asks for.

Loaded by path in worker processes; it knows nothing of the benchmark.
"""

import time


def reward(completions, cost_s, **columns):
    text = completions[0]
    match text[-20:].rpartition("harm: ")[2] if "harm: " in text[-20:] else "none":
        case "power":
            # one C call that never ends and lets no signal handler run
            return [float(9**9**9**9 > 0)]
        case "loop":
            while True:
                pass
        case "allocate":
            return [float(len(bytearray(3 * 2**30)))]
        case "nan":
            return [float("nan")]
        case "wrong length":
            return [0.5, 0.5]
        case "exception":
            raise ValueError("the user's own mistake")
    end = time.thread_time() + cost_s[0]
    while time.thread_time() < end:
        pass
    return [0.5]
