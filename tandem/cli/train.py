"""The commands that train, and `tandem export`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from tandem.cli.progress import StepProgress, console, evaluation
from tandem.config.schema import Config
from tandem.jobs.engines import Report, prepare_process
from tandem.jobs.models import build_model
from tandem.jobs.needs import Machine, require_disk
from tandem.jobs.offline import open_dpo_job, open_rm_job, open_sft_job
from tandem.jobs.rl import open_rl_job
from tandem.model.load import unfilled_model
from tandem.run_folder.checkpoint import (
    checkpoint_step,
    latest_checkpoint,
    load_checkpoint,
    step_name,
)
from tandem.run_folder.export import export, export_adapter, keep_model, model_card
from tandem.run_folder.folder import RunFolder, open_run
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.past_run import KEPT_MODEL, entered
from tandem.runtime.errors import UserError
from tandem.train_loop import TrainJob, run_training, trained_model

JobMaker = Callable[[Config, RunFolder, Report], AbstractContextManager[TrainJob]]


JOBS: dict[str, JobMaker] = {
    "train": open_rl_job,
    "sft": open_sft_job,
    "dpo": open_dpo_job,
    "rm": open_rm_job,
    "distill": open_rl_job,
}


def train(command: str, config: Config, folder: Path, fresh: bool = False) -> Path:
    """Run a command of JOBS to its end, export the result; returns the Hugging Face directory."""
    make = JOBS[command]
    with open_run(folder, config, fresh=fresh, command=command) as run:

        def report(text: str) -> None:
            run.log(text)
            console.print(text, markup=False)

        for line in run.news:
            console.print(line, markup=False)
        config = run.config
        with (
            make(config, run, report) as job,
            StepProgress(command, job.steps, eval_every=job.eval_every, log=run.log) as progress,
        ):
            run.note_directory()
            require_disk(config, command, folder, Machine.here(folder))
            keep_model(trained_model(job), config.model.path, folder / KEPT_MODEL)
            digest = run_training(run, job, progress, report)
            rows = read_metrics(folder)
            target = folder / "hf" / step_name(job.steps)
            card = model_card(
                trained_model(job),
                base=config.model.path,
                command=command,
                step=job.steps,
                metrics=rows[-1],
            )
            export(trained_model(job), str(folder / KEPT_MODEL), target, card)
        report(f"done: {job.steps} steps, weights {digest[:16]}, model in {target}")
        evals = [text for row in rows if (text := evaluation(row))]
        if evals:
            report(f"before: {evals[0]}")
            report(f"after:  {evals[-1]}")
    return target


def export_run(folder: Path, step: int | None, out: Path | None, adapter: bool) -> None:
    if out is not None and out.exists():
        raise UserError(
            "the target of the export exists",
            where=str(out),
            expected="a new directory",
            next="choose another --out",
        )
    target = out and out.absolute()
    with entered(folder) as past:
        config = past.config
        head: Literal["tokens", "value"] = "value" if past.command == "rm" else "tokens"
        path = _checkpoint(past.checkpoints, step)
        prepare_process(config)  # an adapter is merged by a product
        tensors, _ = load_checkpoint(path)
        kept = (
            past.kept_model != config.model.path and not config.lora.rank
        )  # an adapter's checkpoint lacks the base's weights
        model = (
            unfilled_model(past.kept_model, head=head)
            if kept
            else build_model(config, config.model.path, head=head)
        )
        model.load_weights(tensors["scorer" if past.command == "rm" else "policy"])
        done = checkpoint_step(path)
        rows = [row for row in read_metrics(past.folder) if row["step"] == done] or [{"step": done}]
        card = model_card(
            model, base=config.model.path, command=past.command, step=done, metrics=rows[-1]
        )
        target = target or past.folder / ("adapter" if adapter else "hf") / step_name(done)
        if adapter:
            export_adapter(model, config.model.path, target, card)
        else:
            export(model, past.kept_model, target, card)
    console.print(f"model in {target}")


def _checkpoint(folder: Path, step: int | None) -> Path:
    if step is not None and (folder / step_name(step)).is_dir():
        return folder / step_name(step)
    newest = latest_checkpoint(folder, console.print) if step is None else None
    if newest is None:
        names = sorted(p.name for p in folder.glob("step_*"))
        raise UserError(
            "there is no such checkpoint",
            where=str(folder),
            found=", ".join(names) or "none",
            expected="a checkpoint" if step is None else step_name(step),
            next="name one that is there with --step, or run longer",
        )
    return newest
