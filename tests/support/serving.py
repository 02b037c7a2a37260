"""The server of an engine, for tests."""

import threading
from contextlib import contextmanager
from functools import partial

import httpx
import openai

from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.serve.endpoints import EngineServer
from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.listening import listening
from tests.support.waiting import WAIT_S

get, post = partial(httpx.get, timeout=WAIT_S), partial(httpx.post, timeout=WAIT_S)
TAKES = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": TAKES}}
ASK = {"role": "user", "content": "What is 6 times 7?"}
SAID = "I see.\n" + write_calls([Call(name="calculator", arguments={"expression": "6*7"})])


@contextmanager
def running(engine, texts, served, **options):
    """The URL; the server is stopped, and its threads are gone, on the way out."""
    before = set(threading.enumerate())
    with listening(
        lambda ready: EngineServer(engine, texts, served, ready=ready, **options)
    ) as url:
        yield url
    assert "engine" not in {t.name for t in set(threading.enumerate()) - before}


def answering(said, texts=None, served=FAKE):
    """A server whose model says that, and ends its turn."""
    return running(FakeEngine(said + "\0"), texts or FakeTexts(), served)


def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def metric(url, name):
    lines = get(f"{url}/metrics").raise_for_status().text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])
