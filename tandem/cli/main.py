"""The `tandem` command: arguments in, exit code out. Nothing heavy is imported before a command
runs.

Exit codes: 0 done, 1 a bug (with its traceback), a failed check of `doctor`, a failed row of `try`
or a difference found by `replay` or `diff`, 2 a user's mistake, or a run that `plan` finds not
ready, 3 a stall (the watchdog says who is to blame), 130 interrupted.
"""

import gc
import signal
import sys
import traceback
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from tandem.cli.arguments import Fresh, Overrides, Recipe, run_folder
from tandem.config.recipe import keys_like, load_config
from tandem.config.schema import is_read
from tandem.registry import find, names
from tandem.runtime.errors import InvariantError, UserError
from tandem.runtime.processes import end_with_starter
from tandem.runtime.version import __version__

FIRST = ("demo", "init", "generate", "tiny", "try", "doctor")  # in --help, before those that train
TRAINING = {
    "train": "Train by reinforcement learning: GRPO, PPO and relatives. The same command resumes a "
    "stopped run.",
    "sft": "Fine-tune on chats, supervised.",
    "dpo": "Learn preferences (DPO, IPO) from chosen and rejected answers.",
    "rm": "Train a reward model on pairs (Bradley-Terry). It is a classifier with one label.",
    "distill": "Distill a teacher on-policy. The model samples, the teacher grades every token.",
}


class Commands(TyperGroup):
    """Commands: those here, and those of the registry, which are imported when they are used.

    A command of the registry is a function with typer's annotations.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return list(dict.fromkeys([*FIRST, *TRAINING, *names("commands"), *own]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own or cmd_name not in names("commands"):
            return own
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        load = partial(find, "commands", cmd_name, key="tandem COMMAND")
        try:
            alone.command(cmd_name)(load())
        except UserError:  # --help asks for every command: one package must not end it
            alone.command(cmd_name, help="(its package cannot be loaded)")(lambda: load())
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse `--steps 3`, an option with the name of a key, and name the override instead."""
        found: Any = super().resolve_command(ctx, args)
        own = {"--help", *(each for one in found[1].params for each in (one.name, *one.opts))}
        for word, following in pairwise([*found[2], "VALUE"]):
            option, _, value = word.partition("=")
            meant = keys_like(option[2:].replace("-", "_"), f"={value or following}")
            is_key = option.startswith("--") and option not in own and "sections are" not in meant
            if is_key and "overrides" in own:
                raise UserError(f"tandem {args[0]} has no option {option}", next=meant[2:])
        return found


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language models by reinforcement learning. Training and inference share a model.",
)


def run() -> None:
    """Run the command line and exit; print a user's error in full, without a traceback."""
    gc.set_threshold(50_000)  # with 700, the search for garbage took a twelfth of a start
    # SIGTERM ends like Ctrl-C; around a run signals.handle_signals takes over
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except InvariantError as error:
        traceback.print_exc()
        print(f"bug: {error}", file=sys.stderr)
        sys.exit(1)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        gc.freeze()  # or Python's end searches for garbage, which takes 2 s


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    end_with_starter()


def add_training_command(command: str, help: str) -> None:
    @app.command(command, help=help)
    def run_command(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
        config = load_config(recipe, overrides or [])
        for key in (override.partition("=")[0] for override in overrides or []):
            if not is_read(command, key):
                near = keys_like(key.rpartition(".")[2], command=command)
                typer.echo(f"warning: tandem {command} does not read {key}{near}", err=True)
        from tandem.cli import train

        train.train(command, config, run_folder(config, recipe, command), fresh)


for _command, _help in TRAINING.items():
    add_training_command(_command, _help)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
