"""`tandem export`: a checkpoint as a Hugging Face directory, or its adapter in PEFT's format."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.cli.progress import console
from tandem.jobs.engines import prepare_process
from tandem.jobs.models import build_model, placement
from tandem.model.config_file import HeadKind, check_model
from tandem.model.custom_code import from_config
from tandem.model.load import ExactModel
from tandem.model.lora import write_adapter_config
from tandem.model.paths import path_of
from tandem.model.placement import CPU_FLOAT32
from tandem.model.stock import stock_class
from tandem.run_folder.best import BEST, read_best
from tandem.run_folder.checkpoint import (
    checkpoint_step,
    checkpoint_versions,
    latest_checkpoint,
    load_checkpoint,
    step_name,
)
from tandem.run_folder.export import export, model_card, write_export
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import PastRun, entered
from tandem.runtime.errors import UserError


def export_run(
    folder: Path,
    step: int | None,
    out: Path | None,
    *,
    adapter: bool,
    best: bool,
    push_to: str,
    max_shard_size: str,
) -> None:
    """Export a checkpoint of a run, by default the newest whole one; adapter: its adapter alone;
    best: that of the best held-out reward; push_to: a name on the hub; max_shard_size: of a
    file of weights."""
    if not re.fullmatch(r"[1-9][0-9]*[KMGT]B", max_shard_size):
        raise UserError(
            "not a size of a file",
            where="--max-shard-size",
            found=max_shard_size,
            expected="a number and KB, MB, GB or TB, e.g. 5GB",
        )
    if out is not None and out.exists():
        raise UserError(
            "the target of the export exists",
            where=str(out),
            expected="a new directory",
            next="choose another --out",
        )
    target = out and out.absolute()
    with entered(folder) as past:
        if best:
            step = _best_step(past, step)
        checkpoint = _find_checkpoint(past.checkpoints, step)
        done, (tensors, state) = checkpoint_step(checkpoint), load_checkpoint(checkpoint)
        model = _load_model(past, tensors)
        rows = [{"step": done}, *read_metrics(past.folder)]
        metrics = [row for row in rows if row["step"] == done][-1]
        about = {"inputs": state["data"], "versions": checkpoint_versions(checkpoint)}
        card = model_card(model, past.config, command=past.command, metrics=metrics, **about)
        target = target or past.folder / ("adapter" if adapter else "hf") / step_name(done)
        if adapter:
            export_adapter(model, past.config.model.path, target, card)
        else:
            export(model, past.kept_model, target, card, max_shard_size=max_shard_size)
    console.print(f"model in {target}")
    if push_to:
        console.print(f"pushed to {push(target, push_to)}")


def _load_model(past: PastRun, tensors: Mapping[str, Mapping[str, Tensor]]) -> ExactModel:
    config = past.config
    head: HeadKind = "value" if past.command == "rm" else "tokens"
    prepare_process(config)  # an adapter is merged by a product
    weights = tensors["scorer" if past.command == "rm" else "policy"]
    model = _unfilled_model(past.kept_model, head=head, dtype=placement(config).dtype)
    if model.named_weights().keys() != weights.keys():
        # a checkpoint has what was trained: an adapter alone, and no buffers
        model = build_model(config, config.model.path, head=head)
    model.load_weights(weights)
    return model


def _best_step(past: PastRun, step: int | None) -> int:
    """Return the step of the best evaluation. Raises UserError if no step is better than the
    starting model, and if another one is named too."""
    if step is not None:
        raise UserError(
            "two checkpoints are named",
            where="tandem export",
            found=f"--step {step} and --best",
            expected="one of them",
        )
    if not (best := read_best(past.folder)).step:
        raise UserError(
            "no step of the run is better than its starting model",
            where=str(past.folder / BEST),
            found=str(best),
            expected="an evaluation with a higher held-out reward",
            next=f"take {past.config.model.path} as it is, or name a checkpoint with --step",
        )
    return best.step


def _find_checkpoint(folder: Path, step: int | None) -> Path:
    """Find the checkpoint of a step, or the newest whole one. Raises UserError if there is none."""
    if step is not None and (folder / step_name(step)).is_dir():
        return folder / step_name(step)
    newest = latest_checkpoint(folder, console.print) if step is None else None
    if newest is None:
        names = sorted(path.name for path in folder.glob("step_*"))
        raise UserError(
            "there is no such checkpoint",
            where=str(folder),
            found=", ".join(names) or "none",
            expected="a checkpoint" if step is None else step_name(step),
            next="name one that is there with --step, or run longer",
        )
    return newest


def _unfilled_model(path: str, *, head: HeadKind = "tokens", dtype: torch.dtype) -> ExactModel:
    """Make the model of a directory with a config, with weights for `load_weights` to fill."""
    from transformers import GenerationConfig

    config = check_model(path, head=head)
    module = from_config(stock_class(head, config), config, dtype=dtype)
    if head == "tokens":
        module.generation_config = GenerationConfig.from_pretrained(path)
    chosen = path_of(config, f"model.path = {path}", CPU_FLOAT32)
    return chosen.maker(path, config, CPU_FLOAT32)(module)  # type: ignore[no-any-return]


def export_adapter(model: ExactModel, source: str, folder: Path, card: str) -> Path:
    """Write the adapter alone, as `peft.PeftModel.from_pretrained(stock model of source, folder)`
    reads it; whole or not at all. Of the language model of a larger checkpoint (text_part) the
    stock model is that of an export.

    The score of a value model goes with it. Raises UserError for a model without an adapter.
    """
    lora = model.lora
    if lora is None:
        raise UserError(
            "the model has no adapter to export",
            where=str(folder),
            found="a model that was loaded without LoRA",
            expected="one with an adapter",
            next="export the whole model",
        )
    weights = {
        f"base_model.model.{name}": weight for name, weight in model.adapter_weights().items()
    }
    scored = "score.weight" in model.trainable()
    if scored:
        weights["base_model.model.score.weight"] = model.head.weight.detach()

    def write(folder: Path) -> None:
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_adapter_config(lora, model.adapted, source, folder, scored=scored)

    return write_export(folder, write, card)


# ---- to the hub, or what HF_ENDPOINT names


def push(folder: Path, name: str) -> str:
    """Make a model repository, private if it is new, hold the files of a folder and no others: an
    adapter of an export before would change the model. Return its address. Raises UserError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=f"Tandem: {folder.name}",
            delete_patterns="*",
        )
        return str(repository)
    # a refusal, a name that is none, or whatever the hub's client raises for a network
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            "the hub did not take the model",
            where=f"{api.endpoint}, --push {name}",
            found=f"{type(error).__name__}: {first}",
            expected="a hub that can be reached, OWNER/NAME, and a token that may write there",
            next=f"the export stays where it is: hf upload {name} {folder}",
        ) from error
