"""The sandboxes of the registry: each is opened from the section [sandbox], after a trial run.

Does not know the purpose of the sandbox.
"""

import shutil
from functools import cache

from tandem.plugins.graders.sandbox.bubblewrap import Bubblewrap
from tandem.plugins.graders.sandbox.fusion import SandboxFusion
from tandem.plugins.graders.sandbox.local import SWITCH, Unisolated
from tandem.plugins.graders.sandbox.protocol import Sandbox, SandboxConfig, trouble_of
from tandem.registry import find
from tandem.runtime.errors import UserError


def bubblewrap(_: SandboxConfig) -> Sandbox:
    """Open bubblewrap; raises UserError if it does not work here."""
    if trouble := _bubblewrap_trouble():
        raise UserError(
            "code of a model needs a sandbox to run in, and there is none",
            where="sandbox",
            found=trouble,
            expected="bubblewrap, or the URL of a SandboxFusion server as sandbox.url",
            next="apt-get install bubblewrap "
            f"(or, to run it as a plain process that can do all you can: {SWITCH}=true)",
        )
    return Bubblewrap()


def fusion(config: SandboxConfig) -> Sandbox:
    """Open the server of SandboxFusion."""
    return SandboxFusion(config.url)


def isolated_if_possible(_: SandboxConfig) -> Sandbox:
    """Open bubblewrap, and without it a place for plain processes."""
    return Unisolated() if _bubblewrap_trouble() else Bubblewrap()


@cache  # one trial run in a process is enough
def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Open the sandbox of a config; raises UserError if there is none."""
    return find("sandboxes", config.kind, key="sandbox")(config)  # type: ignore[no-any-return]


def _bubblewrap_trouble() -> str:
    """Say why bubblewrap cannot be used here, or ""."""
    programs = ("bwrap", "prlimit", "setpriv", "bash")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"no {' and no '.join(missing)} on the PATH"
    return trouble_of(Bubblewrap())
