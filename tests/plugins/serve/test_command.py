"""`tandem serve` as a user runs it: what it refuses before it loads anything, and how it starts and
ends."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tandem.data.renderer import load_renderer
from tandem.model.tiny import make_tiny
from tandem.plugins.serve import command as serve
from tandem.plugins.serve.texts import RendererTexts
from tandem.runtime.errors import UserError
from tandem.serve.listen import require_token
from tests.support.byte_models import make_model
from tests.support.command import ROOT, assert_is_a_users_error, tandem
from tests.support.waiting import WAIT_S


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
    return folder


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.com", "::"])
def test_public_host_without_a_key_is_refused_before_loading(host, tmp_path, monkeypatch):
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    result = tandem("serve", "no/model", "--host", host, cwd=tmp_path)
    assert_is_a_users_error(result, "needs a token", host, "TANDEM_API_KEY")


def options(**changes):
    small = {"model": "no/model", "port": 0, "cache_mb": 8, "max_batch": 4, "device": "cpu"}
    return serve.Options(**small | changes)


def test_a_key_or_a_loopback_host_is_enough():
    for host, key in (("0.0.0.0", "k"), ("localhost", ""), ("::1", ""), ("127.0.0.9", "")):
        require_token(host, key, "TANDEM_API_KEY")


def test_a_taken_port_and_a_missing_model_are_users_errors():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="cannot use this address") as caught:
            serve.serve(options(port=port))
        assert f"--port {port}" in str(caught.value)
    with pytest.raises(UserError, match="cannot use this address"):
        serve.serve(options(host="no.such.host.invalid", api_key="k"))
    with pytest.raises(UserError, match="model directory does not exist"):
        serve.serve(options(model="./none"))


def test_it_says_where_it_serves_and_ends_soon_after_a_signal(model):
    command = [sys.executable, "-m", "tandem", "serve", str(model), "--port", "0"]
    command += ["--served-name", "m", "--cache-mb", "8"]
    environment = {**os.environ, "TANDEM_API_KEY": "k", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as it:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+", it.stdout.readline()).group()
            body = {"model": "m", "prompt": "x", "max_tokens": 255, "n": 64, "stream": True}
            body["temperature"] = 0.01
            sent = {"json": body, "headers": {"Authorization": "Bearer k"}, "timeout": WAIT_S}
            with httpx.stream("POST", f"{url}/v1/completions", **sent) as answer:
                assert answer.status_code == 200
                it.send_signal(signal.SIGTERM)
                assert "the server is stopping" in list(answer.iter_lines())[-2]
            assert it.wait(WAIT_S) == 0
        finally:
            it.kill()
        assert "Traceback" not in it.stderr.read()


# ---- texts


def test_text_that_begins_with_its_own_begin_token_gets_no_second_one(tmp_path):
    """A client that renders the chat template itself: its prompt has the token that the tokenizer
    would write."""
    renderer = load_renderer(make_model(tmp_path))
    renderer.tokenizer.bos_token = "<|bos|>"
    texts = RendererTexts(renderer)
    bos = renderer.tokenizer.bos_token_id
    assert texts.encode("hi").tolist() == texts.encode("<|bos|>hi").tolist()
    assert texts.encode("hi")[0] == bos and (texts.encode("<|bos|>") == bos).sum() == 1
