"""The commands that train: `tandem train`, `sft`, `dpo`, `rm` and `distill`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tandem.choices import choices
from tandem.cli.progress import StepProgress, console, evaluation, print_lines
from tandem.config.schema import Config
from tandem.data.chat_template import read_template
from tandem.jobs.ranks import is_follower
from tandem.registry import find
from tandem.run_folder.checkpoint import step_name, versions
from tandem.run_folder.export import export, keep_model, model_card
from tandem.run_folder.files import KEPT_MODEL
from tandem.run_folder.folder import open_run
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.samples import first_error
from tandem.runtime.image_parts import keep_in
from tandem.runtime.wording import counted
from tandem.train_loop import run_training, trained_model

CPU_ALLOCATOR = "can't allocate memory"  # in the message of PyTorch's


def train(command: str, config: Config, folder: Path, fresh: bool = False) -> Path:
    """Run a command to its end, export the result and return the Hugging Face directory."""
    if is_follower(config):
        from tandem.jobs.follow import follow

        follow(config, command)
        return folder
    if config.run.trackers:
        from tandem.run_folder.tracking import require_trackers

        require_trackers(config.run.trackers)
    with open_run(folder, config, fresh=fresh, command=command) as run:

        def report(text: str) -> None:
            run.log(text)
            console.print(text, markup=False)

        print_lines(run.news)
        config, error_of = run.config, partial(first_error, run.episodes)
        keep_in(folder / "images")
        if processes := processes_of(config):
            report(processes)
        if command in ("sft", "rm") and (config.eval.keep_best or config.eval.patience):
            report(f"eval.keep_best, eval.patience: tandem {command} has no rewards to compare")
        with (
            explain_out_of_memory(config, command),
            find("jobs", command, key="command")(config, run, report) as job,
            StepProgress(command, job.steps, log=run.log, first_error=error_of) as progress,
        ):
            model = trained_model(job)
            template = read_template(config.data.chat_template)
            keep_model(model, config.model.path, folder / KEPT_MODEL, template)
            end = run_training(run, job, progress, report)
            rows = read_metrics(folder)
            target = folder / "hf" / step_name(end.step)
            about = {"inputs": job.data, "versions": versions()}
            card = model_card(model, config, command=command, metrics=rows[-1], **about)
            export(model, str(folder / KEPT_MODEL), target, card)
        report(f"done: {counted(end.step, 'steps')}, weights {end.weights[:16]}, model in {target}")
        evals = [text for row in rows if (text := evaluation(row))]
        if evals:
            report(f"before: {evals[0]}")
            report(f"after:  {evals[-1]}")
        if (best := end.best) is not None:
            if end.step < job.steps:
                report(
                    f"stopped early, at step {end.step} of {job.steps}: {best.misses} evaluations "
                    f"in a row were no better than the best (eval.patience={config.eval.patience})"
                )
            kept = config.eval.keep_best and (run.checkpoints / step_name(best.step)).exists()
            report(f"best: {best}" + f"; tandem export {folder} --best" * kept)
    return target


@contextmanager
def explain_out_of_memory(config: Config, command: str) -> Iterator[None]:
    """Turn an allocation that failed inside, on a GPU or on the CPU, into a UserError with the
    settings that would save most; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        kinds = (MemoryError, torch.OutOfMemoryError)
        if not (isinstance(error, kinds) or CPU_ALLOCATOR in str(error)):
            raise
        advise = find("resources", "memory", key="out of memory")
        raise advise(error, config, command) from error


def processes_of(config: Config) -> str:
    """Describe the processes of a run, and how turns become prompts; "" for one process and one
    turn."""
    mesh, processes = config.parallel.mesh, config.parallel.processes
    parts = [f"{processes} trainer processes ({mesh})"] * bool(mesh)
    described = (choice.describe(config) for choice in choices(config))
    turns = [f"rollout.history = {config.rollout.history}"] * (config.env.name != "single_turn")
    return "; ".join([*parts, *filter(None, described), *turns])
