"""A stand-in for a SandboxFusion server: POST /run_code in a thread, with its fields and statuses,
and no isolation.

with FusionServer() as server: SandboxFusion(server.url)
"""

import base64
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.json_server import JsonServer


class FusionServer(JsonServer):
    """answer: what to reply in place of running anything."""

    def __init__(self, answer=None):
        def reply(path, request):
            found = path == "/run_code" and {"code", "language"} <= set(request)
            return (200 if found else 422), answer or run_code(request)

        super().__init__(reply)


def run_code(request):
    """SandboxFusion's reply: `Finished` with any return code is a run; only its own failures are a
    SandboxError."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        Path(folder, "code").write_text(request["code"])
        program = {"python": sys.executable, "bash": "bash"}[request["language"]]
        ran = _run([program, "code"], folder, request["stdin"], request["run_timeout"])
    success = ran["status"] == "Finished" and ran["return_code"] == 0
    return {
        "status": "Success" if success else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": ran,
        "files": {},
    }


def _run(command, folder, stdin, timeout):
    start, status = time.monotonic(), "Finished"
    # it has a `python`, this machine perhaps not
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    how = {"cwd": folder, "env": {**os.environ, "PATH": path}, "timeout": timeout}
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, **how)
    except subprocess.TimeoutExpired:
        status, done = "TimeLimitExceeded", subprocess.CompletedProcess(command, None, "", "")
    return {
        "status": status,
        "execution_time": time.monotonic() - start,
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
