"""A worker's side of a pool: from the message that starts it to the end of its channel.

pool                                           worker
{"start": {"beat_s", ...}}                -->  load
                                          <--  {"ready": true}
{"id": 7, ...}                            -->  what `load` returned serves
                                          <--  {"id": 7, ...}      once there is a result
                                          <--  {"alive": true}     each beat_s
                                          <--  {"error": {"what", ...}}   a UserError: it ends
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tandem.runtime.errors import UserError
from tandem.workers.channel import Channel, Message, error_message
from tandem.workers.fork_server import LONG_CALL_S, repeated


def serve_from_start(channel: Channel, load: Callable[[Message], Callable[[], None]]) -> None:
    """Serve from the message that starts the worker to the end of the channel. A UserError is sent
    to the pool. load: returns what serves until EOFError."""
    try:
        messages: list[Message] = []
        while not messages:
            channel.wait(LONG_CALL_S)
            messages = list(channel.receive())
        [start] = [message["start"] for message in messages]
        with signs_of_life(channel, start["beat_s"]):
            serve = load(start)
        channel.send({"ready": True})
        serve()
    except UserError as error:
        channel.send(error_message(error))
    except EOFError:  # the pool is gone
        return


def signs_of_life(channel: Channel, beat_s: float) -> AbstractContextManager[None]:
    """Give signs of life from another thread while this one is in a long call."""
    return repeated(lambda: channel.send({"alive": True}), beat_s)
