"""Calls that vLLM gets from a worker, as JSON, without and with rests in updates: of a start, and
of two versions of the weights with a check after each. And what is found where a part of an
update raises.

    VLLM_PYTHON tests/support/sleeping_vllm.py
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace


class RecordedLLM:
    """LLMEngine, as far as weights and sleep go; it has neither."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self, errors=()):
        self.calls, self.asleep, self.errors = [], set(), dict(errors)

    def collective_rpc(self, method, args=()):
        self.calls.append(method)
        if method in self.errors:
            raise self.errors[method]

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

    from tandem.plugins.vllm.engine import VLLMEngine
    from tandem.rollout_workers.worker import Server
    from tandem.weights.hashing import tensor_digests

    llm, weights, channel = RecordedLLM(), {"a": torch.ones(3)}, Sent()
    engine = VLLMEngine(llm, str)
    server = Server(channel, engine, lambda source, descriptors: weights, 60.0, rests)
    for version in (0, 1):
        source = {"digest": "xxh3", "digests": tensor_digests(weights), "probe": None}
        server._handle({"apply": version, "from": source})
        server._handle({"check": version})
    assert [next(iter(message)) for message in channel] == ["applied", "checked"] * 2
    assert all(message.get("differ", []) == [] for message in channel)
    return llm.calls


def refusals():
    import torch

    from tandem.plugins.vllm.engine import VLLMModel
    from tandem.runtime.errors import UserError

    errors = {
        "start_weight_update": RuntimeError("The size of tensor a (192) must match\nat 0"),
        "update_weights": KeyError("layers.0.mlp"),
        "finish_weight_update": AssertionError(),
    }
    found = []
    for part in errors.items():
        try:
            VLLMModel(RecordedLLM([part])).load_weights({"a": torch.ones(3)})
        except UserError as error:
            found.append(error.found)
    return found


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    print(json.dumps([calls(rests=False), calls(rests=True), refusals()]))
