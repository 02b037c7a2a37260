"""The server beside a hostile request: how long does a small request of somebody else wait?

    python benchmarks/serving.py [--context 256] [--model DIR] [--seconds 3]

Starts `tandem serve` for a tiny model of that context, or for a model directory, and sends one
hostile request after another. Meanwhile a small completion of one token is asked for again and
again; its slowest answer is compared with the slowest of the quiet server. Resident memory is the
server's after the hostile request. Prints a table.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import machine

from tandem.model.tiny import make_tiny

PAUSE_S = 0.01  # between two small requests
TIMEOUT_S = 600.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = json.dumps({"prompt": "1 + 1 =", "max_tokens": 1, "seed": 0}).encode()
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A request that is expensive to refuse, or to serve."""

    name: str
    path: str
    body: Callable[[], bytes]


def _chat(count: int) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": "x"}] * count, "max_tokens": 1}
    ).encode()


def _words(size: int) -> bytes:
    return json.dumps({"prompt": "the cat sat on a mat. " * (size // 22), "max_tokens": 1}).encode()


HOSTILE = (
    Hostile(
        name="3.3M prompts of one character",
        path=COMPLETIONS,
        body=lambda: json.dumps({"prompt": ["a"] * 3_300_000}, separators=(",", ":")).encode(),
    ),
    Hostile(
        name="60,000 prompts of one character",
        path=COMPLETIONS,
        body=lambda: json.dumps({"prompt": ["a"] * 60_000}).encode(),
    ),
    Hostile(name="15 MiB of text", path=COMPLETIONS, body=lambda: _words(15 * MIB)),
    Hostile(name="900 KiB of text", path=COMPLETIONS, body=lambda: _words(900 * 1024)),
    Hostile(
        name="200 prompts of 4 KiB",
        path=COMPLETIONS,
        body=lambda: json.dumps(
            {"prompt": ["the cat sat. " * 315] * 200, "max_tokens": 1}
        ).encode(),
    ),
    Hostile(
        name="1M token ids",
        path=COMPLETIONS,
        body=lambda: json.dumps({"prompt": [5] * 1_000_000}).encode(),
    ),
    Hostile(
        name="250,000 token ids",
        path=COMPLETIONS,
        body=lambda: json.dumps({"prompt": [5] * 250_000}).encode(),
    ),
    Hostile(
        name="5M empty lists",
        path=COMPLETIONS,
        body=lambda: b'{"prompt": [' + b"[]," * 5_000_000 + b"[]]}",
    ),
    Hostile(
        name="200,000 open brackets", path=COMPLETIONS, body=lambda: b'{"prompt": ' + b"[" * 200_000
    ),
    Hostile(
        name="1M unknown fields",
        path=COMPLETIONS,
        body=lambda: json.dumps({f"f{n}": n for n in range(1_000_000)}).encode(),
    ),
    Hostile(
        name="60,000 unknown fields",
        path=COMPLETIONS,
        body=lambda: json.dumps({f"f{n}": n for n in range(60_000)}).encode(),
    ),
    Hostile(
        name="3,800 integers of 4,299 digits",
        path=COMPLETIONS,
        body=lambda: b'{"prompt": [' + (b"1" * 4299 + b",") * 3800 + b"1]}",
    ),
    Hostile(name="400,000 messages", path=CHAT, body=lambda: _chat(400_000)),
    Hostile(name="20,000 messages", path=CHAT, body=lambda: _chat(20_000)),
    Hostile(name="2,000 messages", path=CHAT, body=lambda: _chat(2_000)),
    Hostile(
        name="32 answers with 20 log-probs a token",
        path=COMPLETIONS,
        body=lambda: json.dumps(
            {"prompt": "x", "n": 32, "max_tokens": 200, "logprobs": 20}
        ).encode(),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--context", type=int, default=256, help="of the tiny model")
    parser.add_argument("--model", default="", help="a model directory in place of the tiny model")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="of the quiet server, and at least beside a request",
    )
    how = parser.parse_args()
    print(
        machine.describe(),
        f"; {machine.others_cpu_share():.0%} of the cores busy with other work",
        sep="",
    )
    print(
        "| beside | body | answer | after | small requests | slowest | resident memory |\n"
        + "|---" * 7
        + "|"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(how.model or _tiny(folder, how.context)) as (host, pid),
    ):
        _measure(host, lambda: time.sleep(how.seconds))  # what is slow only once
        delays, _ = _measure(host, lambda: time.sleep(how.seconds))
        print(
            f"| nothing | | | | {len(delays)} | {max(delays) * 1e3:.0f} ms | {_resident(pid)} MiB |",
            flush=True,
        )
        for hostile in HOSTILE:
            body = hostile.body()
            delays, (status, after) = _measure(
                host, lambda b=body, h=hostile: _ask(host, h.path, b)
            )
            print(
                f"| {hostile.name} | {len(body) / MIB:.1f} MiB | {status} | {after:.2f} s | {len(delays)} | "
                f"{max(delays) * 1e3:.0f} ms | {_resident(pid)} MiB |",
                flush=True,
            )
    return 0


def _measure(host: str, meanwhile: Callable[[], object]) -> tuple[list[float], object]:
    """Ask for small completions until `meanwhile` has ended: the seconds of each, and what it
    returned."""
    results: list[object] = []
    other = threading.Thread(target=lambda: results.append(meanwhile()))
    other.start()
    delays = []
    while other.is_alive() or not delays:
        status, after = _ask(host, COMPLETIONS, SMALL)
        assert status == 200, status
        delays.append(after)
        time.sleep(PAUSE_S)
    other.join()
    return delays, results[0]


def _ask(host: str, path: str, body: bytes) -> tuple[int, float]:
    """(status, seconds); status 0: the connection was cut before an answer."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status, time.perf_counter() - start
    except OSError:
        return 0, time.perf_counter() - start
    finally:
        connection.close()


def _tiny(folder: str, context: int) -> str:
    make_tiny(folder, max_tokens=context)
    return folder


@contextmanager
def _served(model: str) -> Iterator[tuple[str, int]]:
    """(host and port, process id) of a server."""
    command = [sys.executable, "-m", "tandem", "serve", model, "--port", "0", "--cache-mb", "256"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://(\S+)", server.stdout.readline())
            assert found is not None, "the server did not start"
            yield found[1], server.pid
        finally:
            server.terminate()


def _resident(pid: int) -> int:
    """MiB"""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) >> 10


if __name__ == "__main__":
    sys.exit(main())
