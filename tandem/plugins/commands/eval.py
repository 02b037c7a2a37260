"""`tandem eval`: the engine without the trainer, on the held-out problems."""

import json
import shutil
from pathlib import Path

import torch

from tandem.cli.progress import console, print_table
from tandem.config.schema import Config
from tandem.jobs.engines import open_runner, prepare_process
from tandem.jobs.input_hashes import image_hashes, input_hashes
from tandem.jobs.inputs import missing, read_data
from tandem.jobs.models import placement
from tandem.model.config_file import check_model
from tandem.model.onednn import bfloat16_unit
from tandem.rollout.evaluate import Evaluator
from tandem.run_folder.episode_files import read_episodes
from tandem.run_folder.folder import identity
from tandem.run_folder.journal import Journal
from tandem.runtime.disk import disk_errors
from tandem.runtime.wording import counted


def evaluate(config: Config, out: Path | None, fresh: bool) -> dict[str, float]:
    if out is not None:
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
    prepare_process(config)
    config = _in_own_type(config)
    problems = read_data(config, "eval.data")
    if not problems:
        raise missing("no held-out problems are named", "eval.data", "a JSONL, CSV or Parquet file")
    with open_runner(config, problems, "eval.data", console.print) as (runner, problems):
        journal = None
        if out is not None:
            inputs = input_hashes(config, "eval.data") | image_hashes(p.messages for p in problems)
            answers = out.with_name(f"{out.name}.answers")
            if fresh:
                shutil.rmtree(answers, ignore_errors=True)
            journal = Journal(answers, identity(config, inputs), problems)
            own = filter(journal.is_own, answers.glob("*.parquet"))
            if count := sum(len(read_episodes(path)) for path in own):
                console.print(f"{counted(count, 'answers')} read from {answers}; or --fresh")
        evaluator = Evaluator(config=config, problems=problems, runner=runner, journal=journal)
        metrics = evaluator(0)
    rows = [(name.removeprefix("eval/"), f"{value:.3f}") for name, value in metrics.items()]
    title = f"{config.model.path} in {placement(config).dtype_name} on "
    title += counted(len(problems), "problems")
    print_table(("metric", "value"), rows, title)
    if out is not None:
        out.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def _in_own_type(config: Config) -> Config:
    """Let model.dtype = "auto" be the type that the model was saved in, on a CPU that multiplies
    bfloat16: a run that exported it in this type evaluated it so."""
    model, on_cpu = config.model, placement(config).device.type == "cpu"
    if model.dtype != "auto" or not (on_cpu and bfloat16_unit()):
        return config
    dtype = "bfloat16" if check_model(model.path).dtype == torch.bfloat16 else "float32"
    return config.model_copy(update={"model": model.model_copy(update={"dtype": dtype})})
