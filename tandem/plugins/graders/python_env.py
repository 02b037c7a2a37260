"""The built-in environment `python`: the model writes code and reads its output from the sandbox.

    [env]
    name = "python"
    options = {seconds = 5}

Code is a call of the tool `python`, or a fenced block marked `python` or `py` (several of a turn
are one program). A turn without code is the final answer and ends the episode; rewards score it.
Every run is a fresh process: nothing is kept from one to the next. Isolation is the sandbox's
matter.
"""

import math
import os
import re
import threading

from tandem.config.episodes import Sandbox as SandboxConfig
from tandem.envs.calls import in_thread
from tandem.envs.tools import ToolEnv, ToolUnavailable
from tandem.plugins.graders.sandbox.protocol import (
    Limits,
    Result,
    SandboxFailed,
    open_sandbox,
    run_python,
)
from tandem.types import Observation

_FENCED = re.compile(
    r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_BWRAP = SandboxConfig()
# more at once only take each other's wall clock
_RUNS = threading.BoundedSemaphore(os.cpu_count() or 1)


class PythonEnv(ToolEnv):
    """The environment `python`: answers a fenced block in the user's role, which every chat
    template knows, and a tool call in the role `tool`.

    Parts: `runs`, `failed_runs` (exit code not 0), and those of ToolEnv.
    """

    def __init__(
        self,
        *,
        sandbox: SandboxConfig = _BWRAP,
        seconds: float = 5.0,
        memory_mb: int = 512,
        format: str = "auto",
        show_tools: bool = True,
        invalid_call_penalty: float = 0.0,
        max_result_chars: int = 2000,
    ):
        """Take the options. seconds, memory_mb: limits of a run; the others are ToolEnv's."""
        super().__init__(
            self.python,
            format=format,
            show_tools=show_tools,
            invalid_call_penalty=invalid_call_penalty,
            max_result_chars=max_result_chars,
        )
        self._sandbox = open_sandbox(sandbox)
        self._limits = Limits(wall_s=seconds, cpu_s=math.ceil(seconds), memory_mb=memory_mb)
        self.num_runs = self.num_failed = 0

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program.
        """
        try:
            with _RUNS:
                result = run_python(self._sandbox, code, limits=self._limits)
        except SandboxFailed as error:
            raise ToolUnavailable(str(error)) from error
        self.num_runs += 1
        self.num_failed += result.exit_code != 0
        return report(result, self.max_result_chars)

    async def step(self, text: str) -> Observation:
        code = fenced_code(text)
        if not code or self.read(text).calls:
            return await super().step(text)
        printed = await in_thread(self.python, code)
        messages = ({"role": "user", "content": f"```output\n{printed}\n```"},)
        return Observation(messages=messages, parts=self.parts())

    def parts(self) -> dict[str, float]:
        return {
            **super().parts(),
            "runs": float(self.num_runs),
            "failed_runs": float(self.num_failed),
        }


def fenced_code(text: str) -> str:
    """Join the fenced blocks of Python after a text's thoughts into one program; "" without one.

    A prompt may have opened the <think>, so the last </think> ends the thoughts.
    """
    return "\n".join(_FENCED.findall(text.rpartition("</think>")[2]))


def report(result: Result, longest: int) -> str:
    """Describe a run for the model: the start of its output and the end of its errors, at most
    `longest` characters in all, and how it ended if not well."""
    out, errors = result.stdout.strip("\n"), result.stderr.strip("\n")
    room = longest // 2 if errors else longest
    out = out if len(out) <= room else f"{out[:room]}... ({len(out) - room} more characters)"
    errors = errors if len(errors) <= longest // 2 else f"...{errors[-(longest // 2) :]}"
    ended = ""
    if result.stop_reason != "exit":
        ended = f"(stopped: {result.stop_reason})"
    elif result.exit_code:
        ended = "" if errors else f"(exit code {result.exit_code})"
    elif not out and not errors:
        ended = "(no output)"
    return "\n".join(filter(None, (out, errors, ended)))
