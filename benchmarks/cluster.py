"""`make cluster`: results/cluster.md, what ran here of the engines for clusters and what did not.

    python benchmarks/cluster.py [vllm ...]   these sections, default all; rows of others are kept
    python benchmarks/cluster.py --page       writes the page from results/cluster.json

A section is a function that runs something for real and returns its rows (what, result, how);
cluster_page.py renders them below the hand-written text.
"""

import json
import sys
from collections.abc import Callable
from datetime import date

import cluster_model
import cluster_ray
import cluster_stream
import cluster_vllm
import cluster_weights
import machine
from cluster_page import JSON, Row, write_page

SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "vllm": cluster_vllm.run,
    "smollm2": cluster_vllm.run_smollm2,
    "ray": cluster_ray.run,
    "stream": cluster_stream.run,
    "weights": cluster_weights.run,
    "delta": cluster_weights.run_trained,
    "model": cluster_model.run,
}


def main(*arguments: str) -> int:
    results = json.loads(JSON.read_text()) if JSON.exists() else {}
    for name in [] if "--page" in arguments else arguments or SECTIONS:
        print(f"== {name}", flush=True)
        place = f"{machine.describe()}; others used {machine.others_cpu_share():.0%} of the cores"
        rows = SECTIONS[name]()
        results[name] = {"rows": rows, "machine": place, "date": str(date.today())}
        JSON.write_text(json.dumps(results, indent=1) + "\n")
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
