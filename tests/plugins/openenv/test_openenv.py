"""The example of OpenEnv's own package, served on loopback. Skipped without an interpreter that has
it: OpenEnv wants another `mcp` than Tandem, so it has an environment of its own."""

import os
import socket
import subprocess

import httpx
import pytest

pytest.importorskip("websockets")
PYTHON = os.environ.get("OPENENV_PYTHON", "")
if not PYTHON:
    pytest.skip("OPENENV_PYTHON names no Python with openenv", allow_module_level=True)

from tandem.plugins.openenv import OpenEnv
from tandem.types import Problem
from tests.support.env_steps import play
from tests.support.waiting import WAIT_S

SERVE = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
sys.path.insert(0, sys.argv[1])
from models import EchoAction, EchoObservation
from server.echo_environment import EchoEnvironment

app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=64)
uvicorn.run(app, fd=int(sys.argv[2]), log_level="error")
"""
PROBLEM = Problem(uid="p", messages=({"role": "user", "content": "Say something."},), answer="")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openenv")
    init = [PYTHON, "-m", "openenv.cli", "init", "echo", "--output-dir", str(folder)]
    subprocess.run(init, check=True, capture_output=True, timeout=WAIT_S)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        arguments = [str(folder / "echo"), str(sock.fileno())]
        server = subprocess.Popen([PYTHON, "-c", SERVE, *arguments], pass_fds=[sock.fileno()])
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            assert httpx.get(f"{url}/health", timeout=WAIT_S).is_success
            yield url
        finally:
            server.kill()
            server.wait()


def test_a_turn_is_a_text_in_a_field(url):
    env = OpenEnv(url, action="message", observation="echoed_message")
    opening, first, second = play(env, PROBLEM, "<think>hm</think>\nhello", "a" * 20)
    assert [m["content"] for m in opening] == ["Say something.\n\nEcho environment ready!"]
    assert first.messages == ({"role": "user", "content": "hello"},)
    assert (first.reward, second.reward, second.done) == (0.5, 1.0, False)
    assert second.parts == {"turns": 2.0, "bad_actions": 0.0}


def test_a_turn_is_a_json_object_and_what_is_refused_is_told(url):
    texts = '```json\n{"message": "hi"}\n```', "hi", '{"text": 1}'
    opening, *heard = play(OpenEnv(url), PROBLEM, *texts)
    assert opening[0]["content"].endswith(
        '{"echoed_message": "Echo environment ready!", "message_length": 0}'
    )
    first, second, third = [one.messages[0]["content"] for one in heard]
    assert first == '{"echoed_message": "hi", "message_length": 2}'
    assert second.startswith("error: no action: ")
    assert third.startswith("error: no action: ") and "message" in third
    assert heard[-1].parts["bad_actions"] == 2
