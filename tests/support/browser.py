"""Headless Chromium through chromedriver, by WebDriver's own JSON over HTTP."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.waiting import WAIT_S, eventually

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
]


def missing():
    """Say what is not installed, or nothing."""
    names = ("chromedriver", "chromium")
    return ", ".join(f"no {name}" for name in names if shutil.which(name) is None)


@contextmanager
def browser(width=1440, height=900, dark=False):
    """A Browser with an empty profile; all of it is gone on the way out."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="chromium-"))
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--silent"],
        env=os.environ | {"TMPDIR": str(folder)},  # a Chromium that is killed leaves folders there
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False)
    one = None
    try:
        assert eventually(lambda: _is_ready(client)), "chromedriver does not start"
        one = Browser(client, [*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"])
        one.resize(width, height, dark)
        yield one
    finally:
        if one is not None:
            client.delete(one.session)
        client.close()
        driver.terminate()
        driver.wait(WAIT_S)
        assert eventually(lambda: _is_removed(folder)), f"Chromium still writes to {folder}"


def _is_removed(folder):
    """Remove a folder; false as long as processes on their way out still write there."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _is_ready(client):
    try:
        return client.get("/status").json()["value"]["ready"]
    except httpx.TransportError:
        return False


class Browser:
    """One page."""

    def __init__(self, client, arguments):
        self.client = client
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        made = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()
        assert "sessionId" in made["value"], made
        self.session = f"/session/{made['value']['sessionId']}"

    def _post(self, path, **body):
        answer = self.client.post(f"{self.session}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url):
        self._post("url", url=url)

    def run(self, script):
        """The value of a function's body."""
        return self._post("execute/sync", script=script, args=[])

    def until(self, script):
        """Wait until a function's body returns something true; return it."""
        found = eventually(lambda: self.run(script))
        assert found, f"never: {script}"
        return found

    def cdp(self, command, **parameters):
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def mouse(self, kind, x, y, **more):
        self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    def resize(self, width, height, dark=False):
        mobile = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot", format="png")["data"]))

    def requested(self):
        """Every address that was asked for since the last call."""
        entries = [
            json.loads(one["message"])["message"]
            for one in self._post("se/log", type="performance")
        ]
        return [
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]
