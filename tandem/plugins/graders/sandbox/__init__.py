"""Untrusted programs: run under bubblewrap on this machine, or on a SandboxFusion server.

protocol.py has the callers' interface, docs/guide/sandbox.md lists the guarantees. It does not know
the purpose of the programs: ../code.py compares their results, and believes nothing else.

    python -c "from tandem.plugins.graders.sandbox import *; print(Bubblewrap())"
"""

from tandem.plugins.graders.sandbox.bubblewrap import Bubblewrap
from tandem.plugins.graders.sandbox.fusion import SandboxFusion
from tandem.plugins.graders.sandbox.local import LocalSandbox, Unisolated
from tandem.plugins.graders.sandbox.protocol import (
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxFailed,
    open_sandbox,
    run_python,
)

__all__ = [
    "Bubblewrap",
    "Limits",
    "LocalSandbox",
    "Program",
    "Result",
    "Sandbox",
    "SandboxFailed",
    "SandboxFusion",
    "Unisolated",
    "open_sandbox",
    "run_python",
]
