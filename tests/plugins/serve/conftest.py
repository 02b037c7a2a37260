"""One tiny model behind one server, for all tests of this folder."""

import pytest

from tests.support.serving import running
from tests.support.tiny_server import TinyServer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return TinyServer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def url(tiny):
    with running(tiny.engine, tiny.texts, tiny.served) as url:
        yield url
