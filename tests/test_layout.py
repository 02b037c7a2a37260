"""The house rules that a program can hold: who imports whom, what an import does, sizes, docstrings."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import config_page
import figures

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tandem"
FILES = sorted(PACKAGE.rglob("*.py"))
STAGES = ("data", "engine", "envs", "model", "rewards", "rl", "stream", "train", "weights")
SHARED = {
    "types",
    "config",
    "contradictions",
    "errors",
    "draws",
    "disk",
    "metrics",
    "model",
    "numerics",
    "sandbox",
    "user_code",
    "watchdog",
    "processes",
    "guard",
}
ALSO = {"train": {"rl"}}
OPTIONAL = ("datasets", "deepspeed", "fastapi", "flash_attn", "gguf", "gymnasium", "jsonschema",
            "megatron", "mooncake", "nixl", "peft", "ray",
            "reasoning_gym", "starlette", "trackio", "transfer_queue", "uvicorn", "verifiers", "vllm", "wandb")  # fmt: skip


@cache
def imported(path):
    """Every module that a file imports, anywhere in it, as a dotted name; `from tandem import x` is tandem.x too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module)
            found |= {f"tandem.{alias.name}" for alias in node.names if node.module == "tandem"}
    return found


def name(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_the_shared_middle_and_never_another_stage(stage):
    allowed = SHARED | {stage} | ALSO.get(stage, set())
    for path in (PACKAGE / stage).rglob("*.py"):
        parts = {module.split(".")[1] for module in imported(path) if module.startswith("tandem.")}
        assert parts <= allowed, f"{name(path)} imports {sorted(parts - allowed)}"


def test_the_shared_middle_imports_no_stage():
    for path in FILES:
        if name(path).partition("/")[0].removesuffix(".py") in SHARED - {"model"}:
            parts = {m.split(".")[1] for m in imported(path) if m.startswith("tandem.")}
            assert parts <= SHARED - {"model"}, path


def test_every_folder_is_a_stage_or_the_commands():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - {"cli", "cluster", "sandbox"} <= set(STAGES)


def test_an_optional_stack_is_imported_in_one_file_each():
    users = {stack: [name(p) for p in FILES if stack in {m.split(".")[0] for m in imported(p)}] for stack in OPTIONAL}
    assert {stack: files for stack, files in users.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    "package", ["types", "config", "recipe", "errors", "draws", "disk", "sandbox", "envs", "data", "rewards", "stream"]
)
def test_what_needs_no_tensor_does_not_import_torch(package):
    path = PACKAGE / package
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    assert [name(f) for f in files if "torch" in {m.split(".")[0] for m in imported(f)}] == []


def test_importing_tandem_and_its_command_has_no_effects():
    code = """
import os, sys, threading
environment = dict(os.environ)
import tandem, tandem.config, tandem.types, tandem.cli.main
print(sorted({"torch", "transformers", "pyarrow"} & set(sys.modules)), dict(os.environ) == environment, threading.active_count())
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] True 1"


def test_every_file_says_what_it_is():
    """An empty __init__.py has nothing to say; every file with code does."""
    silent = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            silent.append(name(path))
    assert silent == []


def test_files_and_functions_keep_within_the_limits_of_the_house():
    result = subprocess.run([sys.executable, "tools/size.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("within every limit\n")


def test_the_examples_that_docs_show_are_the_files():
    """`make figures` copies them."""
    shown = [block for page in (ROOT / "docs").glob("*.md") for block in figures.FILE_BLOCK.finditer(page.read_text())]
    assert len(shown) >= 4 and all(figures.show_file(block) == block[0] for block in shown)


def test_only_the_reward_workers_recover_from_everything_and_no_test_patches():
    """House rules 17 and 26; a worker runs a user's code, so recovering from all of it is the feature there."""
    broad = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "BaseException")
    ]
    assert [place for place in broad if not place.startswith("rewards/")] == []
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {module for module in imported(path) if module.split(".")[0] == "mock" or "unittest.mock" in module}


def test_the_page_of_the_configuration_is_made_from_the_code():
    assert config_page.PAGE.read_text() == config_page.page()
