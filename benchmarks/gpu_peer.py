"""nano-vllm or vLLM on requests.json in a model's directory; prints the seconds of a second pass.

    python benchmarks/gpu_peer.py nanovllm DIR

Both have the class and the settings of the same names. A process of its own: a peer takes the whole
device.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path


def main(who: str, folder: str) -> None:
    peer = import_module(who)
    asked = json.loads((Path(folder) / "requests.json").read_text())
    sampling = [
        peer.SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count)
        for count in asked["counts"]
    ]
    # the first pass compiles and captures; other tokens, so that the second finds nothing cached
    passes = [[[token + 1 for token in p] for p in asked["prompts"]], asked["prompts"]]
    # as nano-vllm's own bench.py runs both: CUDA graphs on
    llm = peer.LLM(folder, enforce_eager=False, max_model_len=4096)
    for prompts in passes:
        given = [{"prompt_token_ids": p} for p in prompts] if who == "vllm" else prompts
        start = time.perf_counter()
        llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
    print(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
