"""Print what extras of pyproject.toml ask for: `pip install` of that does not compile Tandem again.

pip install $(python tools/extras.py ray mcp)
"""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

needed = [one for name in sys.argv[1:] for one in PROJECT["optional-dependencies"][name]]
print(*(requirement.replace(" ", "") for requirement in needed))
