"""Hashes of the files that a run is a function of: data, weights and code of starting models, a
user's functions and environments. A run resumes with the same, and every rank has the same
functions."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.config.schema import Config
from tandem.data.readers import source_files
from tandem.envs.load import source_files as env_files
from tandem.model.custom_code import python_files
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of
from tandem.runtime.user_code import source_file
from tandem.types import Message

MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
IMAGES = "images"  # the key of those in the data


def input_hashes(config: Config, *keys: str) -> dict[str, str]:
    """Hash the inputs of a run: the data files that these keys name, the chat template, the files
    of environment and functions (but for `eval.metric`, which changes no step), and in local model
    directories the weights, what is text (config, tokenizer, image processor), and Python files
    if those run. SHA-256 by key."""
    models = {
        "model.path": config.model.path,
        "model.reference": config.model.reference,
        "critic.path": config.critic.path,
        "distill.teacher": config.distill.teacher,
        "reward.model": config.reward.model,
    }
    paths: dict[str, Path] = {}
    for key in keys:
        section, field = key.split(".")
        named = getattr(getattr(config, section), field)
        names = [named] * bool(named) if isinstance(named, str) else named
        files = [file for name in names for file in source_files(name, key)]
        paths |= {key if len(files) == 1 else f"{key}/{file}": file for file in files}
    for key, folder in models.items():
        beside = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        files = [file for file in beside if file.suffix in MODEL_FILES]
        if config.model.trust_remote_code:
            files += python_files(folder)
        paths |= {f"{key}/{file.relative_to(folder)}": file for file in files}
    if config.data.chat_template:
        paths["data.chat_template"] = Path(config.data.chat_template)
    for name in config.reward.functions:
        if (file := source_file(name)) is not None:
            paths[f"reward.function/{file}"] = file
    paths |= {f"env/{file}": file for file in env_files(config.env)}
    found = {key: _input_hash(key, path) for key, path in paths.items() if path.is_file()}
    return found | (function_hashes(config) if "data.train" in keys else {})


def image_hashes(chats: Iterable[Sequence[Message]]) -> dict[str, str]:
    """Hash the names of the images, which name their content, chat by chat; {} without images."""
    names = [" ".join(images_of(chat)) for chat in chats]
    return {IMAGES: hashlib.sha256("\n".join(names).encode()).hexdigest()} if any(names) else {}


def function_hashes(config: Config) -> dict[str, str]:
    """Hash the files of a user's functions that every rank calls. SHA-256 by key."""
    rl = config.rl
    names = {"rl.loss": rl.loss, "rl.advantage": rl.advantage, "rl.filter": rl.filter}
    files = {key: source_file(name) for key, name in names.items()}
    return {
        f"{key}/{file}": _input_hash(key, file)
        for key, file in files.items()
        if file is not None and file.is_file()
    }


def require_same_functions(config: Config, expected: dict[str, str]) -> None:
    """Raise UserError unless this rank finds the files of a user's functions as rank 0 does."""
    found = function_hashes(config)
    if different := sorted(key for key in expected if found.get(key) != expected[key]):
        raise UserError(
            "a rank has another file of a function of yours than rank 0",
            where=different[0],
            found=found.get(different[0], "no file"),
            expected=expected[different[0]],
            next="put the same file at the same path on every machine",
        )


def _input_hash(key: str, path: Path) -> str:
    try:
        return file_hash(path)
    except OSError as error:
        raise UserError(
            "a file that the run is a function of cannot be read",
            where=f"{key.partition('/')[0]}: {path}",
            found=error.strerror or str(error),
            next=f"ls -l {path}",
        ) from None
