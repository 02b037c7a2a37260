"""A tracker that fails or hangs as it is told; else it writes what it gets to a file, a JSON value
a line.

    python tests/support/odd_tracker.py FILE KIND PARENT
"""

import json
import os
import sys
import time
from pathlib import Path

from tandem.run_folder.trackers.process import serve
from tandem.runtime.worker_channel import die_with_parent


class OddTracker:
    def __init__(self, run, file, kind):
        self.file, self.kind = file, kind
        self.write(["open", run.id, run.name, run.config["run"]["seed"]])
        self.obey("open")

    def write(self, value):
        with self.file.open("a") as file:
            file.write(json.dumps(value) + "\n")

    def obey(self, moment):
        match self.kind.split("-"):
            case ["raise", when] if when == moment:
                raise ConnectionError(f"no route at {moment}")
            case ["hang", when] if when == moment:
                time.sleep(3600)
            case ["exit", when] if when == moment:
                os._exit(7)

    def log(self, step, metrics):
        self.write(["log", step, metrics])
        self.obey("log")

    def log_samples(self, step, rows):
        self.write(["samples", step, rows])

    def close(self):
        self.write(["close"])
        self.obey("close")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    serve(lambda run: OddTracker(run, Path(sys.argv[1]), sys.argv[2]))
