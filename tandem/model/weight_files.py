"""The weight files of a model directory: safetensors only, as exported. A hub name's files are not
checked, but transformers fetches safetensors only.
"""

from pathlib import Path

from tandem.model.config_file import find_file
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError

ADAPTER = "adapter_config.json"
SUMS = "SHA256SUMS"  # beside exported weights
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")


def check_weights(path: str) -> None:
    """Raise UserError unless a directory has weights in safetensors, and no adapter beside them."""
    if find_file(path, ADAPTER) is not None:  # which transformers would load, and merge
        raise UserError(
            "the model has an adapter beside its weights",
            where=f"{path}, {ADAPTER}",
            expected="plain weights",
            next="merge the adapter into the weights with PEFT, or move its files elsewhere",
        )
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    others = sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern))
    if not others:
        raise cannot_load(path, f"no {WEIGHTS} and no {INDEX}")
    raise UserError(
        "the model cannot be loaded",
        where=str(folder / others[0]),
        found="weights in a format that can run code when it is loaded, or is not exact",
        expected="weights in safetensors beside config.json",
        next="where you trust the file, convert it: "
        'python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}', trust_remote_code=False)"
        f".save_pretrained('{folder}-safetensors')\", and copy the tokenizer files beside it",
    )


def check_sums(path: str) -> None:
    """Raise UserError if weights differ from SHA256SUMS; a directory without it passes."""
    folder = Path(path)
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        recorded, _, name = line.partition("  ")
        if name.endswith(".safetensors"):
            found = file_hash(folder / name) if (folder / name).is_file() else "no such file"
            if found != recorded.lower():
                raise UserError(
                    "the weights are not those that were exported",
                    where=str(folder / name),
                    found=found,
                    expected=f"{recorded}, as in {SUMS}",
                    next=f"export them again; or remove {SUMS} if they were changed on purpose",
                )


def cannot_load(path: str, found: str) -> UserError:
    return UserError(
        "the model cannot be loaded",
        where=path,
        found=found,
        expected="weights in safetensors beside config.json",
        next="copy or export the model's files again",
    )
