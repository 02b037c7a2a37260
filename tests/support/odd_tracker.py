"""A tracker that fails or hangs as it is told; else it writes what it gets to a file, a JSON value
a line."""

import json
import time


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
                time.sleep(60)

    def log(self, step, metrics):
        self.write(["log", step, metrics])
        self.obey("log")

    def log_samples(self, step, rows):
        self.write(["samples", step, rows])

    def close(self):
        self.write(["close"])
        self.obey("close")
