"""Calls that vLLM gets from a worker, as JSON, without and with rests in updates: of a start, and
of two versions of the weights with a check after each.

    VLLM_PYTHON tests/support/sleeping_vllm.py
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace


class RecordedLLM:
    """LLMEngine, as far as weights and sleep go; it has neither."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self):
        self.calls, self.asleep = [], set()

    def collective_rpc(self, method, args=()):
        self.calls.append(method)

    def is_sleeping(self):
        return bool(self.asleep)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True


class Sent(list):
    """A channel that keeps what it is given."""

    last_sent, send, descriptors = 0.0, list.append, ()


def calls(rests):
    import torch

    from tandem.engine.worker_pool.vllm_engine import VLLMEngine
    from tandem.engine.worker_pool.worker import Server
    from tandem.weights.hashing import tensor_digests

    llm, weights, channel = RecordedLLM(), {"a": torch.ones(3)}, Sent()
    engine = VLLMEngine(llm, str)
    server = Server(channel, engine, lambda source, descriptors: weights, 60.0, rests)
    for version in (0, 1):
        source = {"digests": tensor_digests(weights), "probe": None}
        server._handle({"apply": version, "from": source})
        server._handle({"check": version})
    assert [next(iter(message)) for message in channel] == ["applied", "checked"] * 2
    assert all(message.get("differ", []) == [] for message in channel)
    return llm.calls


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    print(json.dumps([calls(rests=False), calls(rests=True)]))
