"""Write results/hardware.md: what `tandem plan` says of public shapes on a CPU. No weights are needed.

python tools/hardware_page.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling_models import OTHERS, QWEN3  # noqa: E402

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
SMALL = "train.tokens_per_microbatch=2048 train.activation_checkpointing=true"
SETTINGS = {
    "default": "",
    "small microbatches, checkpointing": SMALL,
    "the same, `model.dtype=bfloat16`": f"{SMALL} model.dtype=bfloat16",
    "the same, `train.optimizer=adamw_8bit`": f"{SMALL} model.dtype=bfloat16 train.optimizer=adamw_8bit",
    "adapters: `lora.rank=16`": f"{SMALL} lora.rank=16",
    "adapters over 4 bits: `lora.base=nf4`": f"{SMALL} lora.rank=16 lora.base=nf4",
}
RECIPE = (
    '[model]\ndtype = "float32"\n[data]\ntrain = "rows.jsonl"\n[rollout]\nmax_new_tokens = 512\n'
)
HEAD = f"""# Memory by model and setting

Written by `python tools/hardware_page.py` from `tandem plan --json`: GiB of a GRPO run on a CPU, one process, 512 new tokens, a cache of
1 GiB, a save under way counted. Python and its libraries take about 1 GiB more. Small microbatches are
`{SMALL}`. [plan_accuracy.md](plan_accuracy.md) compares plans with runs.
"""


def main() -> None:
    lines = [HEAD, f"| setting | {' | '.join(MODELS)} |", f"|---|{'---|' * len(MODELS)}"]
    with tempfile.TemporaryDirectory() as folder:
        tandem(folder, "tiny", "tiny")
        tandem(folder, "generate", "algebra", "--count", "60", "--out", "rows.jsonl")
        Path(folder, "my.toml").write_text(RECIPE)
        for name in MODELS:
            write_model(Path(folder), name)
        for setting, overrides in SETTINGS.items():
            sums = [memory(folder, name, overrides) / 2**30 for name in MODELS]
            lines.append(f"| {setting} | {' | '.join(f'{size:.0f}' for size in sums)} |")
    (ROOT / "results" / "hardware.md").write_text("\n".join([*lines, ""]))


def write_model(folder: Path, name: str) -> None:
    """Write a directory with the model's shapes, a tokenizer of characters and no weights."""
    config = {**QWEN3, **OTHERS}[name]
    config.architectures = ["Qwen3ForCausalLM"]
    (folder / name).mkdir()
    for file in (folder / "tiny").iterdir():
        if file.suffix != ".safetensors":
            (folder / name / file.name).write_bytes(file.read_bytes())
    config.save_pretrained(folder / name)


def memory(folder: str, name: str, overrides: str) -> int:
    words = ["plan", "my.toml", f"model.path={name}", *overrides.split(), "--json", "plan.json"]
    tandem(folder, *words, check=False)  # it has no weights, so it is not ready
    return sum(json.loads(Path(folder, "plan.json").read_text())["memory"].values())


def tandem(folder: str, *words: str, check: bool = True) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tandem", *words]
    subprocess.run(command, cwd=folder, env=environment, check=check, capture_output=True)


if __name__ == "__main__":
    main()
