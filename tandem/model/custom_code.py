"""Python files that a model directory brings along for its architecture or tokenizer (`auto_map`).

They run with everything that their user may do, so they run only in a process that `allow` was
called in: where model.trust_remote_code is set. transformers imports a copy of them from its cache.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError

KEY = "model.trust_remote_code"
LANGUAGE_MODEL = "AutoModelForCausalLM"
_allowed = False


def allow(trusted: bool) -> None:
    """Let this process run the files of model directories from now on, or no longer."""
    global _allowed
    _allowed = trusted


def is_allowed() -> bool:
    return _allowed


def brings_model(values: dict[str, Any]) -> bool:
    """Tell whether a config.json names files with a language model of its own."""
    classes = values.get("auto_map")
    return isinstance(classes, dict) and LANGUAGE_MODEL in classes


def is_custom(config: Any) -> bool:
    """Tell whether a transformers config is of a directory whose files may run."""
    return getattr(config, "auto_map", None) is not None


def custom_config(path: str) -> Any:
    """Make the transformers config of a directory whose files may run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=True)


def from_config(make: Any, config: Any, **options: Any) -> Any:
    """Make the module of a transformers config, which may be one of its directory's files. make:
    an Auto class."""
    config = copy.deepcopy(config)
    return make.from_config(config, trust_remote_code=is_custom(config), **options)


def save_files(module: Any, folder: Path) -> None:
    """Copy the files that make a module's class into a directory."""
    from transformers.dynamic_module_utils import custom_object_save

    custom_object_save(module, folder)


def python_files(path: str) -> list[Path]:
    """List the Python files of a model directory; none of a hub name."""
    return sorted(Path(path).rglob("*.py")) if path and Path(path).is_dir() else []


def require_allowed(path: str, values: dict[str, Any], where: str) -> None:
    """Raise UserError unless the files that `auto_map` names may run, and are of this model.
    values: of the JSON file that has it."""
    # of e.g. {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    named = sorted(set(re.findall(r'"([^"]+)\.\w+"', json.dumps(values["auto_map"]))))
    files = ", ".join(f"{name}.py" for name in named)
    if any("--" in name for name in named):
        raise UserError(
            "the model would run Python files of another repository",
            where=where,
            found=f"auto_map names {files}",
            expected="files beside config.json, which the run can hash",
            next="copy them into the model directory, and drop NAME-- in auto_map",
        )
    if not _allowed:
        raise UserError(
            "the model runs Python files of its own",
            where=where,
            found=f"{files} in {path}, which auto_map names",
            expected=f"{KEY} = true, where you have read them and trust them",
            next=f"{KEY}=true in the recipe (tandem serve: --trust-remote-code)",
        )
