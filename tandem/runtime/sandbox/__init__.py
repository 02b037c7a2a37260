"""Untrusted programs: run under bubblewrap on this machine, or on a SandboxFusion server.

protocol.py has the callers' interface, opening.py chooses a sandbox, docs/sandbox.md lists the
guarantees. It does not know the purpose of the programs: rewards/code.py compares their results,
and believes nothing else.

    python -c "from tandem.runtime.sandbox import *; print(run_python(Bubblewrap(), 'print(1)'))"
"""

from tandem.runtime.sandbox.bubblewrap import Bubblewrap
from tandem.runtime.sandbox.fusion import SandboxFusion
from tandem.runtime.sandbox.local import Unisolated
from tandem.runtime.sandbox.opening import open_sandbox, open_sandbox_once, sandbox_state
from tandem.runtime.sandbox.protocol import (
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxConfig,
    SandboxFailed,
    run_python,
)

__all__ = [
    "Bubblewrap",
    "Limits",
    "Program",
    "Result",
    "Sandbox",
    "SandboxConfig",
    "SandboxFailed",
    "SandboxFusion",
    "Unisolated",
    "open_sandbox",
    "open_sandbox_once",
    "run_python",
    "sandbox_state",
]
