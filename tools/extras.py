"""Install what extras of pyproject.toml ask for, without compiling Tandem again: `python tools/extras.py ray mcp`."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIP = [
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-compile",
    "-c",
    "constraints.txt",
]


def main(names: list[str]) -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = [requirement for name in names for requirement in extras[name]]
    return subprocess.call([sys.executable, *PIP, *needed], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
