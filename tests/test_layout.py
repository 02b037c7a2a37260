"""The house rules that a program can hold: who imports whom, what an import does, sizes,
docstrings."""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import config_page
import figures

from tandem.registry import BUILT_IN, TABLES
from tests.support import selection

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tandem"
FILES = sorted(PACKAGE.rglob("*.py"))
DOOR = {"types", "registry", "choices"}  # what every room may import beside runtime/
ROOMS = {  # room -> the other rooms that it may import; none of them leads back to it
    "runtime": set(),
    "workers": set(),
    "config": {"rl"},  # of rl, what is known of an algorithm by its name
    "model": set(),
    "weights": set(),
    "rollout_workers": {"engine", "model", "weights", "workers"},
    "rl": {"model"},
    "data": {"config", "model"},
    "engine": {"model", "weights", "workers"},
    "serve": set(),
    "envs": {"config", "model"},
    "rewards": {"config", "workers"},
    "run_folder": {"config", "model", "weights"},
    "rollout": {"config", "data", "envs", "rl", "run_folder"},
    "trainer": {"config", "model", "rl"},
}
# each imports those before it
KNOWS_EVERYONE = ["step", "step_async", "train_loop", "jobs", "cli", "api", "__main__"]
OPTIONAL = """
datasets deepspeed fastapi flash_attn gguf gymnasium jsonschema llguidance megatron minisweagent
mlflow mooncake nixl peft ray reasoning_gym resvg_py starlette tensorboardX trackio transfer_queue
uvicorn verifiers vllm wandb
"""


def imported(path):
    """Every module that a file imports, anywhere in it, as a dotted name; `from tandem import x` is
    tandem.x too."""
    return read(path)[0]


@cache
def read(path):
    """(what a file imports, lines of its broad handlers, whether it has code and no docstring)"""
    found, broad, tree = set(), [], ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name("BaseException")):
                broad.append(node.lineno)
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{path}: a relative import"
                found |= {module} | {
                    f"tandem.{alias.name}" for alias in names if module == "tandem"
                }
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value)],
            ):
                found.add(value)
    return found, broad, bool(tree.body) and not ast.get_docstring(tree)


def name(path):
    return str(path.relative_to(PACKAGE))


def rooms_of(path):
    """The rooms and files at the door that a file imports, but for its own room's. `make size` counts
    what it imports of plugins."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {module.split(".")[1] for module in imported(path) if module.startswith("tandem.")} - {
        own,
        "__version__",
        "plugins",
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed = ROOMS[room] | DOOR | {"runtime"}
    for path in (PACKAGE / room).rglob("*.py"):
        assert rooms_of(path) <= allowed, f"{name(path)} imports {sorted(rooms_of(path) - allowed)}"


def test_agents_share_the_application_and_the_schema_with_the_server():
    """Neither brings an engine with it."""
    used = set().union(*(imported(path) for path in (PACKAGE / "plugins" / "agents").rglob("*.py")))
    assert {module for module in used if module.startswith("tandem.serve")} == {
        "tandem.serve.apis",
        "tandem.serve.app",
        "tandem.serve.listen",
        "tandem.serve.openai",
    }
    shared = imported(PACKAGE / "serve" / "openai.py")
    assert {module for module in shared if module.startswith("tandem.")} == {"tandem.types"}


def test_no_room_can_be_reached_from_a_room_that_it_imports():
    def below(room):
        return {room}.union(*(below(lower) for lower in ROOMS[room]))

    assert [(room, lower) for room in ROOMS for lower in ROOMS[room] if room in below(lower)] == []
    for place, room in enumerate(KNOWS_EVERYONE):
        for path in FILES:
            if name(path).split("/")[0].removesuffix(".py") == room:
                assert not rooms_of(path) & set(KNOWS_EVERYONE[place + 1 :]), name(path)


def test_the_map_in_the_docstring_names_what_is_there():
    """At most 29 names in `ls tandem/`; each room and each file at the door has its line in the
    map."""
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 29
    mapped = set(
        re.findall(
            r"^  (\w+)(?:/|\.py) ",
            ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())),
            re.M,
        )
    )
    assert mapped == {entry.removesuffix(".py") for entry in entries} - {
        "__init__",
        "__main__",
        "py.typed",
    }
    assert mapped == {*ROOMS, *DOOR, *KNOWS_EVERYONE, "plugins"} - {"__main__"}


def test_an_optional_stack_is_imported_in_one_file_of_a_room():
    """All HTTP servers are serve/app.py, which alone runs uvicorn; no other stack has two files."""
    users = {
        stack: sorted(name(p) for p in FILES if stack in {m.split(".")[0] for m in imported(p)})
        for stack in OPTIONAL.split()
    }
    assert {stack: files for stack, files in users.items() if len(files) > 1} == {
        "starlette": [
            "plugins/agents/server.py",
            "plugins/serve/endpoints.py",
            "plugins/tinker/server.py",
            "plugins/view/app.py",
            "serve/app.py",
        ]
    }


WITHOUT_TORCH = """
types config runtime/errors runtime/rng runtime/disk plugins/graders plugins/tasks envs data rewards
rollout
"""


@pytest.mark.parametrize("package", WITHOUT_TORCH.split())
def test_what_needs_no_tensor_does_not_import_torch(package):
    path = PACKAGE / package
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    assert [name(f) for f in files if "torch" in {m.split(".")[0] for m in imported(f)}] == []


def test_importing_tandem_and_its_command_has_no_effects():
    code = """
import os, sys, threading
os.environ.pop("MKL_CBWR", None)  # the tests' own
environment = dict(os.environ)
import tandem, tandem.config.schema, tandem.types, tandem.cli.main, tandem.runtime.numerics
print(sorted({"torch", "transformers", "pyarrow"} & set(sys.modules)), dict(os.environ) == environment, threading.active_count())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] True 1"


def test_every_file_says_what_it_is():
    """An empty __init__.py has nothing to say; every file with code does."""
    assert [name(path) for path in FILES if read(path)[2]] == []


def test_the_examples_that_docs_show_are_the_files():
    """`make figures` copies them."""
    shown = [
        block
        for page in (ROOT / "docs").rglob("*.md")
        for block in figures.FILE_BLOCK.finditer(page.read_text())
    ]
    assert len(shown) >= 3 and all(figures.show_file(block) == block[0] for block in shown)


def test_only_the_reward_workers_recover_from_everything_and_no_test_patches():
    """House rules 17 and 26; a worker runs a user's code, so recovering from all of it is the
    feature there."""
    broad = [f"{name(path)}:{line}" for path in FILES for line in read(path)[1]]
    allowed = ("rewards/", "plugins/graders/", "workers/pool")
    assert [place for place in broad if not place.startswith(allowed)] == []
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {
            module
            for module in imported(path)
            if module.split(".")[0] == "mock" or "unittest.mock" in module
        }


def test_every_choice_of_the_registry_is_there():
    """Read, not imported: many need a package that may not be installed."""
    for kind, places in {**BUILT_IN, "tables": TABLES}.items():
        for place in places.values():
            module, _, member = place.partition(":")
            assert member in names_of(file_of(module)), f"{kind}: {place}"


def test_no_test_module_imports_another():
    """Helpers that they share are in tests/support."""
    modules = {path: imported(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(modules) > 80
    shared = {path: {m for m in found if m and ".test_" in m} for path, found in modules.items()}
    assert {path: found for path, found in shared.items() if found} == {}


def test_the_page_of_the_configuration_is_made_from_the_code():
    assert config_page.PAGE.read_text() == config_page.page()


def test_scripts_beside_the_package_find_what_they_import():
    """Nothing else imports most of them, so a module that moves would break them unseen."""
    scripts = {
        path.stem: path for name in ("benchmarks", "examples", "tools") for path in files(name)
    }
    missing = []
    for path in [*scripts.values(), *files("chaos")]:
        tree, modules = ast.parse(path.read_text()), {}  # name in the script -> file of ours
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {
                    a.asname or a.name: scripts[a.name] for a in node.names if a.name in scripts
                }
                missing += [
                    (path.name, a.name) for a in node.names if not is_there(a.name, scripts)
                ]
            elif isinstance(node, ast.ImportFrom) and is_there(node.module, scripts):
                source = scripts.get(node.module) or file_of(node.module)
                for alias in node.names if source else ():
                    inner = file_of(f"{node.module}.{alias.name}")
                    if inner is not None:
                        modules[alias.asname or alias.name] = inner
                    elif alias.name not in names_of(source):
                        missing.append((path.name, f"{node.module}.{alias.name}"))
            elif isinstance(node, ast.ImportFrom):
                missing.append((path.name, node.module))
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        stored |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                source = modules.get(node.value.id) if node.value.id not in stored else None
                if source is not None and node.attr not in names_of(source):
                    missing.append((path.name, f"{node.value.id}.{node.attr}"))
    assert missing == []


def is_there(module, scripts):
    """Tell whether an import finds a script, a module of this project, or a package."""
    first = module.split(".")[0]
    if first in ("tandem", "tests", "chaos"):
        return file_of(module) is not None
    return (
        first in scripts or first in OPTIONAL.split() or importlib.util.find_spec(first) is not None
    )


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def file_of(module):
    """The file of a module of this project, or None."""
    path = ROOT / module.replace(".", "/")
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


@cache
def names_of(path):
    """The names that a file defines, imports or assigns anywhere."""
    tree = ast.parse(path.read_text())
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)}
    return names | {
        a.asname or a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }


def test_each_long_or_nightly_test_is_there():
    for name in selection.read(selection.LONG) + selection.read(selection.TESTS / "nightly.txt"):
        file, _, function = name.partition("::")
        assert (ROOT / file).exists(), name
        assert not function or f"def {function}(" in (ROOT / file).read_text("utf-8"), name
