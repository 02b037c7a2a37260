"""The opening of a config's sandbox, after a trial run.

Does not know the purpose of the sandbox.
"""

import shutil
import subprocess
from functools import cache

from tandem.plugins.graders.sandbox.bubblewrap import Bubblewrap
from tandem.plugins.graders.sandbox.fusion import SandboxFusion
from tandem.plugins.graders.sandbox.local import Unisolated
from tandem.plugins.graders.sandbox.protocol import (
    Limits,
    Sandbox,
    SandboxConfig,
    SandboxFailed,
    run_python,
)
from tandem.runtime.errors import UserError

SWITCH = "sandbox.run_untrusted_code_without_isolation"
TRIAL, TRIAL_OUTPUT, TRIAL_LIMITS = "print(6 * 7)", "42\n", Limits(wall_s=30.0)


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Open the sandbox of a config; raises UserError if there is none."""
    if config.url:
        return SandboxFusion(config.url)
    trouble = _bubblewrap_trouble()
    if not trouble:
        return Bubblewrap()
    if config.run_untrusted_code_without_isolation:
        return Unisolated()
    raise UserError(
        "code of a model needs a sandbox to run in, and there is none",
        where="sandbox",
        found=trouble,
        expected="bubblewrap, or the URL of a SandboxFusion server as sandbox.url",
        next="apt-get install bubblewrap "
        f"(or, to run it as a plain process that can do all you can: {SWITCH}=true)",
    )


open_sandbox_once = cache(open_sandbox)  # one trial run in a process is enough


def sandbox_state(config: SandboxConfig) -> str:
    """Describe in one line, for `tandem doctor`, the sandbox for code, after a trial of it."""
    try:
        sandbox = open_sandbox(config)
        result = run_python(sandbox, TRIAL, limits=TRIAL_LIMITS)
    except UserError as error:
        return f"none: {error.found}; next: apt-get install bubblewrap"
    except SandboxFailed as error:
        return f"fails: {error}"
    works = "works" if result.stdout == TRIAL_OUTPUT else f"fails: {result.stderr.strip()[-200:]}"
    match sandbox:
        case Bubblewrap():
            command = [sandbox.bwrap, "--version"]
            version = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            return f"{version}, {works} ({result.seconds * 1e3:.0f} ms a run)"
        case Unisolated():
            return f"NOT ISOLATED ({SWITCH}), {works}"
        case _:
            return f"{config.url}, {works}"


def _bubblewrap_trouble() -> str:
    """Say why bubblewrap cannot be used here, or ""."""
    programs = ("bwrap", "prlimit", "setpriv", "bash")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"no {' and no '.join(missing)} on the PATH"
    try:
        result = run_python(Bubblewrap(), TRIAL, limits=TRIAL_LIMITS)
    except SandboxFailed as error:
        return str(error)
    if (result.stdout, result.exit_code) == (TRIAL_OUTPUT, 0):
        return ""
    return f"a trial run ended by {result.stop_reason}: {result.stderr.strip()[-500:]}"
