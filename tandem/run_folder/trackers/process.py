"""The process of a tracker: it opens the run at the tracker, and hands on what the trainer sends.

    python -m tandem.run_folder.trackers.process wandb PARENT

Started by links.py. What the tracker prints goes to trackers/NAME.txt of the run folder.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, assert_never, cast

from tandem.run_folder.trackers.tracker import TrackedRun, Tracker
from tandem.runtime.worker_channel import Channel, Message, die_with_parent, take_channel

MAX_LINE_BYTES = 64 << 20
WAIT_S = 3600.0

Name = Literal["wandb", "trackio", "mlflow"]


def open_tracker(name: Name, run: TrackedRun) -> Tracker:
    """Open the run at the tracker of that name."""
    match name:
        case "wandb":
            from tandem.run_folder.trackers.wandb import WandbTracker

            return WandbTracker(run)
        case "trackio":
            from tandem.run_folder.trackers.trackio import TrackioTracker

            return TrackioTracker(run)
        case "mlflow":
            from tandem.run_folder.trackers.mlflow import MlflowTracker

            return MlflowTracker(run)
    assert_never(name)


def serve(opened: Callable[[TrackedRun], Tracker]) -> None:
    """Do what each message says and answer it; end after an error, after "close", and when the
    trainer has ended."""
    channel = take_channel(MAX_LINE_BYTES)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody may ask for a key there
    messages = _messages(channel)
    with suppress(EOFError):
        try:
            tracker = opened(TrackedRun(**next(messages)))
            channel.send({})
            for message in messages:
                _obey(tracker, message)
                channel.send({})
                if "close" in message:
                    return
        except EOFError:
            raise
        except Exception as error:  # whatever a tracker raises is a warning of the trainer
            channel.send({"error": f"{type(error).__name__}: {error}"})


def _obey(tracker: Tracker, message: Message) -> None:
    match message:
        case {"metrics": metrics, "step": step}:
            tracker.log(step, metrics)
        case {"samples": rows, "step": step}:
            tracker.log_samples(step, rows)
        case _:
            tracker.close()


def _messages(channel: Channel) -> Iterator[Message]:
    while True:
        yield from channel.receive()
        channel.wait(WAIT_S)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    name = cast(Name, sys.argv[1])
    serve(lambda run: open_tracker(name, run))
