"""Access to `tandem view`, and what its pages may do."""

import re
import subprocess
import sys

import httpx
import pytest

from tandem.plugins.view.app import POLICY
from tests.support.command import ROOT
from tests.support.viewing import make_run, viewing
from tests.support.waiting import WAIT_S

STATIC = ROOT / "tandem" / "plugins" / "view" / "static"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one")
    return root


@pytest.fixture(scope="module")
def url(root):
    with viewing(root) as url:
        yield url


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_there(url, method):
    assert httpx.request(method, f"{url}/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/api/runs", "/api/step?run=one&step=1", "/nothing"]
)
def test_every_answer_has_the_policy_and_none_is_for_another_site(url, path):
    headers = httpx.get(url + path).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    refused = httpx.get(url + path, headers={"Host": "evil"})
    assert refused.status_code == 403 and refused.headers["content-security-policy"] == POLICY
    for wanted in ("default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'"):
        assert wanted in POLICY
    assert "unsafe" not in POLICY and "http" not in POLICY


def test_a_token_opens_once_and_stays_in_a_cookie(root):
    with viewing(root, token="a-secret") as url, httpx.Client(base_url=url) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/?token=a-secreT").status_code == 401
        assert client.get("/", headers={"Cookie": b"tandem_view=\xff"}).status_code == 401
        opened = client.get("/?token=a-secret")
        assert opened.status_code == 303 and opened.headers["location"] == "/"
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        assert client.get("/api/runs").status_code == 200  # with the cookie
        assert client.get("/api/runs", headers={"Host": "box.example"}).status_code == 200


def test_the_printed_address_opens_whatever_the_token_is(root):
    command = ["tandem", "view", str(root), "--port", "0", "--token", "ab+c/d==&#%"]
    server = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        address = server.stdout.readline().split()[-1]
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(address).status_code == 200
    finally:
        server.terminate()
        server.communicate(timeout=WAIT_S)


def test_the_front_end_has_no_markup_from_texts_and_no_foreign_address():
    """Nothing that the policy refuses in a browser is even tried."""
    for path in [*STATIC.glob("*.js"), STATIC / "index.html"]:
        text = path.read_text()
        used = re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=", text)
        assert used == [], path.name
        addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)", page) == [] and not re.search(r"\son\w+=", page)
