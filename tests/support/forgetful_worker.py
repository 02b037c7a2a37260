"""A rollout worker whose vLLM does not process a tied head again after an update, as vLLM's own
path does not.

    VLLM_PYTHON tests/support/forgetful_worker.py PARENT < SOCKET
"""

import sys
from pathlib import Path


def load(start):
    from tandem.plugins.vllm import worker as vllm_worker

    vllm_worker.set_environment(start["device"], start["options"])
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from tandem.plugins.vllm.engine import SharedMemoryTransfer, load_vllm

    class Forgetful(SharedMemoryTransfer):
        def finish_weight_update(self):
            finalize_layerwise_reload(self.model, self.model_config)

    WeightTransferEngineFactory.register_engine("forgetful", Forgetful)
    return load_vllm(start, vllm_worker.memory_share, "forgetful")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    from tandem.rollout_workers.worker import run
    from tandem.workers.fork_server import prepare

    run(prepare(int(sys.argv[-1])), load)
