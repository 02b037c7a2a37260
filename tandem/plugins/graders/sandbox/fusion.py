"""Programs on a server of ByteDance's SandboxFusion, over its HTTP API.

Isolation and memory are the server's. https://github.com/bytedance/SandboxFusion
"""

import base64
import shlex
from collections.abc import Mapping, Sequence

from tandem.config.episodes import Sandbox as SandboxConfig
from tandem.plugins.graders.sandbox.protocol import (
    LIMITS,
    Limits,
    Result,
    SandboxFailed,
    StopReason,
    check_name,
    reason_of_end,
    trouble_of,
)
from tandem.runtime.http import Json, Refused, ServerBusy, ServerLost, ask, start, with_retries

RETRIES, PAUSE_S = 3, 0.5  # while the server is busy


def open_fusion(config: SandboxConfig) -> "SandboxFusion":
    """Return the server of a config, without asking it."""
    return SandboxFusion(config.url)


class SandboxFusion:
    """The server at a URL. Implements Sandbox."""

    limits = LIMITS

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def state(self) -> str:
        trouble = trouble_of(self)
        return f"fails: {trouble}" if trouble else f"{self.url}, works"

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] = {},
        stdin: str = "",
        limits: Limits = LIMITS,
    ) -> Result:
        others = {
            check_name(name): base64.b64encode(text.encode()).decode()
            for name, text in files.items()
        }
        script = command[-1]
        python = command[0] == "python" and script in others
        if python:
            del others[script]
        request = {
            "code": files[script] if python else shlex.join(command),
            "language": "python" if python else "bash",
            "stdin": stdin,
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "files": others,
        }
        run = self._post("/run_code", request, limits.wall_s)["run_result"]
        streams = [run.get(name) or "" for name in ("stdout", "stderr")]
        cut = (text.encode()[: limits.output_bytes].decode(errors="ignore") for text in streams)
        out, err = cut
        exit_code = run.get("return_code")
        if run.get("status") == "TimeLimitExceeded":
            reason: StopReason = "timeout"
        elif [out, err] != streams:
            reason = "output"
        else:
            reason = reason_of_end(exit_code, err)
        return Result(
            stdout=out,
            stderr=err,
            exit_code=None if reason in ("timeout", "output") else exit_code,
            stop_reason=reason,
            seconds=float(run.get("execution_time") or 0.0),
        )

    def _post(self, path: str, request: Json, wall_s: float) -> Json:
        seconds = 2 * wall_s + 30  # its queue comes before its clock

        def run() -> Json:
            try:
                call = ask(self.url + path, request, connect_s=seconds, answer_s=seconds)
                return start(call).result()
            except (ServerLost, Refused) as error:
                raise SandboxFailed(f"no answer from the sandbox at {self.url}: {error}") from error

        try:
            answer = with_retries(run, RETRIES, PAUSE_S)
        except ServerBusy as error:
            raise SandboxFailed(f"the sandbox at {self.url} is busy: {error}") from error
        if not isinstance(answer.get("run_result"), dict):
            raise SandboxFailed(
                f"the sandbox at {self.url} did not run the program: {str(answer)[:500]}"
            )
        return answer
