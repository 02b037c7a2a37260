"""Seconds of a step, for `tandem plan --time`: a few steps of the run itself, with random models of
one and of two layers in the place of its own, in a process and a folder of their own.

    seconds = one layer's + (layers - 1) x (two layers' - one layer's)

All else is the recipe's: data, rewards, widths, batch, threads. Completions are as long as a random
model's, nearly always rollout.max_new_tokens; a trained one may stop earlier. Other processes on
this machine make it slower, as they do the run.
"""

import copy
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.data.renderer import GENERATION
from tandem.model.config_file import check_model, read_json
from tandem.model.custom_code import from_config
from tandem.model.paths import reads_more_than_text
from tandem.model.tokenizer import load_tokenizer
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.errors import UserError

STEPS, SKIPPED = 4, 1  # of a trial; kernels are compiled in the first
TRIALS = 2  # of each number of layers
MODELS = ("model.path", "model.reference", "critic.path", "distill.teacher", "reward.model")
LIMIT_S = 1200.0  # of a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Measured seconds of a step, and what they are made of."""

    seconds: float
    first_layer: float  # with all that is no layer
    layer: float  # each further one
    layers: int
    tokens: float  # of a completion in the trials; 0 where none are sampled

    def __str__(self) -> str:
        length = f", {self.tokens:.0f} tokens a completion" * bool(self.tokens)
        if self.layers <= 2:
            return f"{self.seconds:.3g}, of a random model{length}"
        further = f"{self.layers - 1} x {self.layer:.3g} for the other layers"
        return (
            f"{self.seconds:.3g}, {self.first_layer:.3g} with one random layer + {further}{length}"
        )


def step_time(config: Config, command: str, layers: int) -> StepTime:
    """Measure a step. Raises UserError if a trial fails."""
    if reads_more_than_text(check_model(config.model.path).model_type):
        raise UserError(
            "the time of a step with images is not measured",
            where=f"tandem plan --time, model.path = {config.model.path}",
            found="a model that reads images",
            next="tandem plan without --time; or run.steps=3, and timings.jsonl",
        )
    counts, times, tokens = [1, 2] if layers > 2 else [layers], dict[int, list[float]](), 0.0
    for count in counts * TRIALS:  # by turns: a machine is slower for a while
        steps, tokens = _trial(config, command, count, layers)
        times.setdefault(count, []).extend(steps)
    first, last = median(times[counts[0]]), median(times[counts[-1]])
    each = max(0.0, last - first)
    seconds = first + (layers - 1) * each if layers > 2 else first
    return StepTime(seconds=seconds, first_layer=first, layer=each, layers=layers, tokens=tokens)


def _trial(config: Config, command: str, count: int, layers: int) -> tuple[list[float], float]:
    """Run a few steps with models of `count` layers in the place of `layers`; return the seconds
    of each, and the tokens of a completion."""
    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as temporary:
        folder = Path(temporary)
        steps = {"steps": STEPS}  # and no evaluation, save or tracker
        run = {**steps, "folder": str(folder / "run"), "save_every": 1 << 30, "trackers": []}
        trial = _with(config, "run", **run, show_samples=0)
        trial = _with(trial, "eval", data="", every=0, metric="", keep_best=False, patience=0)
        trial = _with(trial, "critic", warmup_steps=0)
        trial = _with(trial, "rl", max_flat_steps=0, max_truncated=1.0)
        trial = _with(_with(trial, "sft", **steps), "preference", **steps)
        for key in MODELS:
            section, name = key.split(".")
            path = getattr(getattr(config, section), name)
            if path:
                head: Literal["tokens", "value"] = "value" if key == "reward.model" else "tokens"
                shape = check_model(path, key, head="value")
                part = max(1, round(shape.num_hidden_layers * count / layers))
                target = folder / name
                random_directory(path, target, part, head)
                trial = _with(trial, section, **{name: str(target)})
        recipe = folder / "recipe.toml"
        recipe.write_text(to_toml(trial))
        words = [sys.executable, "-m", "tandem", command, str(recipe)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
            errors, failed = done.stderr.splitlines(), done.returncode != 0
        except subprocess.TimeoutExpired:
            errors, failed = [f"no end after {LIMIT_S:.0f} s"], True
        rows = [] if failed else read_metrics(folder / "run", "timings.jsonl")
        seconds = [row["step_s"] for row in rows if "step_s" in row][SKIPPED:]
        if not seconds:
            found = "; ".join(line.strip() for line in errors if line.strip())
            raise UserError(
                "the time of a step could not be measured",
                where="tandem plan --time",
                found=found[:300] or "no steps",
                next="tandem plan without --time says what stops the run itself",
            )
        metrics = read_metrics(folder / "run")[-1]
        return seconds, float(metrics.get("completion_tokens", 0.0))


def _with(config: Config, section: str, **values: Any) -> Config:
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def random_directory(
    path: str, target: Path, layers: int, head: Literal["tokens", "value"] = "tokens"
) -> None:
    """Write a random model of the shapes of another one, with its tokenizer and its first layers'
    kinds."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    shape = copy.deepcopy(check_model(path, head="value"))
    shape.num_hidden_layers = layers
    if getattr(shape, "layer_types", None):  # transformers' own, not in every config
        shape.layer_types = shape.layer_types[:layers]
    if head == "value":
        shape.num_labels = 1
    make = AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM
    from_config(make, shape, dtype=torch.float32).save_pretrained(target)
    load_tokenizer(path).save_pretrained(target)
    generation = read_json(path, GENERATION)
    if generation is not None:
        (target / GENERATION).write_text(json.dumps(generation))
