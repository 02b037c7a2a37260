"""The `tandem` command: arguments in, exit code out. Nothing heavy is imported before a command
runs.

Exit codes: 0 done, 1 a bug (with its traceback), a failed check of `doctor`, a failed row of `try`
or a difference found by `replay` or `diff`, 2 a user's mistake, or a run that `plan` finds not
ready, 3 a stall (the watchdog says who is to blame), 130 interrupted.
"""

import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from tandem import __version__
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.runtime.errors import InvariantError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning for language models; training and inference on one model code.",
)

Recipe = Annotated[
    str, typer.Argument(help="TOML recipe, e.g. recipes/demo.toml", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.field=value, any number", show_default=False)
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="start over; the old run folder is kept beside it")
]


def run() -> None:
    """Entry point: user errors are told in full, without a traceback."""
    # a polite kill ends like Ctrl-C; around a run stopping.on_signals takes over
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
    except KeyboardInterrupt as interrupt:
        for note in interrupt.__dict__.get("__notes__", []):
            print(note, file=sys.stderr)
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    pass


def run_folder(config: Config, recipe: str, command: str) -> Path:
    return Path(config.run.folder or f"runs/{Path(recipe).stem}-{command}")


@app.command()
def train(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """Reinforcement learning: GRPO, PPO and relatives. The same command resumes a run that was
    stopped."""
    _train("train", recipe, overrides, fresh)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """Supervised fine-tuning on chats."""
    _train("sft", recipe, overrides, fresh)


@app.command()
def dpo(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """Preference optimization (DPO, IPO) on pairs of a chosen and a rejected answer."""
    _train("dpo", recipe, overrides, fresh)


@app.command()
def rm(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """A reward model on pairs (Bradley-Terry), as a sequence classifier with one label."""
    _train("rm", recipe, overrides, fresh)


@app.command()
def distill(recipe: Recipe, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """On-policy distillation: the model samples, a teacher grades every token."""
    _train("distill", recipe, overrides, fresh)


def _train(command: str, recipe: str, overrides: list[str] | None, fresh: bool) -> None:
    config = load_config(recipe, overrides or [])
    from tandem.cli import train

    train.train(command, config, run_folder(config, recipe, command), fresh)


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.jsonl, or a folder for Parquet files; default: runs/rollout",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start over; the old output is kept beside it")
    ] = False,
    keep: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH",
            help="also write the problems whose mean reward lies in that range, "
            "as <out>.kept.jsonl",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Generate and score episodes of the training problems. The same command resumes what was
    stopped."""
    config = load_config(recipe, overrides or [])
    from tandem.cli import rollout, rollout_filter

    rollout.rollout(config, out, fresh, rollout_filter.parse_range(keep) if keep else None)


@app.command()
def generate(
    task: Annotated[
        str, typer.Argument(help="a task, e.g. countdown, guess, reasoning_gym:NAME, verifiers:ID")
    ],
    out: Annotated[Path, typer.Option(help="FILE.jsonl", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="how many problems")] = 1000,
    difficulty: Annotated[
        int | None, typer.Option(help="from 1 on; default: the task's own", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same problems")] = 0,
    split: Annotated[
        str, typer.Option(help="train or test, which never share a problem")
    ] = "train",
    weights: Annotated[
        str, typer.Option(help="of several reasoning_gym data sets, e.g. 2,1", show_default=False)
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Generate the problems of a built-in task, or of reasoning-gym."""
    from tandem.cli import generate

    generate.generate(
        task,
        out,
        count=count,
        difficulty=difficulty,
        seed=seed,
        split=split,
        weights=weights,
        force=force,
    )


@app.command()
def tiny(
    folder: Annotated[
        Path, typer.Argument(help="where the model goes: a new folder", show_default=False)
    ],
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from", help="a data set whose characters it knows; any number", show_default=False
        ),
    ] = None,
    vocab: Annotated[
        str,
        typer.Option(
            help="characters; default: those of --from, or printable ASCII", show_default=False
        ),
    ] = "",
    hidden: Annotated[int, typer.Option(min=8, help="width of the model")] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    heads: Annotated[int, typer.Option(min=1, help="attention heads")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="key/value heads")] = 2,
    intermediate: Annotated[int, typer.Option(min=1, help="width of the MLP")] = 640,
    context: Annotated[int, typer.Option(min=8, help="tokens of the longest sequence")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same weights")] = 0,
) -> None:
    """Make a tiny random model of characters, to train at once: a real model's every file, in
    seconds, without a network."""
    from tandem.cli import tiny

    tiny.tiny(
        folder,
        sources=sources or [],
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        max_tokens=context,
        seed=seed,
    )


@app.command("try")
def try_out(
    what: Annotated[
        str,
        typer.Argument(
            help="a reward function (my.py:score, answer) or an environment (my.py:Shop, guess)"
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[str, typer.Option(help="problems", show_default=False)] = "",
    model: Annotated[
        str, typer.Option(help="model that answers; default: you do", show_default=False)
    ] = "",
    answer: Annotated[
        list[str] | None,
        typer.Option(help="an answer instead of typing; once a turn, for every row"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="how many rows")] = 3,
    recipe: Annotated[
        str | None, typer.Option(help="TOML recipe for everything else", show_default=False)
    ] = None,
) -> None:
    """Try a reward function or an environment on a few rows: its score, the parts of it, and the
    time."""
    from tandem.cli import try_out

    given = [f"data.train={data}"] * bool(data) + [f"model.path={model}"] * bool(model)
    failed = try_out.try_out(
        load_config(recipe, [*try_out.setting(what), *given, *(overrides or [])]),
        answer or [],
        rows,
    )
    sys.exit(1 if failed else 0)


@app.command("eval")
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="also write the metrics to this JSON file")
    ] = None,
) -> None:
    """Evaluate a model on the held-out problems: sampled and greedy, by category."""
    config = load_config(recipe, overrides or [])
    from tandem.cli import eval

    eval.evaluate(config, out)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    step: Annotated[
        int | None, typer.Option(help="checkpoint to export; default: the newest")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="target; default: <run>/hf/step_N, or <run>/adapter/step_N")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the LoRA adapter alone, in PEFT's format")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory for stock transformers and vLLM; adapters are
    merged in."""
    from tandem.cli import train

    train.export_run(run, step, out, adapter)


Run = Annotated[Path, typer.Argument(help="run folder", show_default=False)]


@app.command()
def replay(
    run: Run,
    step: Annotated[int, typer.Option(help="as in metrics.jsonl, from 1 on", show_default=False)],
) -> None:
    """Learn a step again from the run folder: equal to the last bit, or the first difference (exit
    code 1)."""
    from tandem.cli import replay

    sys.exit(replay.replay_step(run, step))


@app.command()
def show(
    run: Run,
    step: Annotated[
        int | None, typer.Option(min=0, help="default: the newest", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="highest rewards first")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    count: Annotated[int, typer.Option(min=1, help="how many")] = 4,
    held_out: Annotated[
        bool, typer.Option("--eval", help="those of the step's evaluation")
    ] = False,
) -> None:
    """Show episodes of a step: the conversation, the reward and its parts, and how it ended."""
    from tandem.cli import show

    show.show(run, step, best=best, worst=worst, count=count, held_out=held_out)


@app.command()
def why(
    run: Run,
    episode: Annotated[
        str, typer.Option(help="STEP:UID:SAMPLE; or UID, or STEP, for a list", show_default=False)
    ],
    learning: Annotated[
        bool, typer.Option(help="replay the step that trained it, for advantages and ratios")
    ] = True,
    json: Annotated[
        Path | None, typer.Option(help="also write all of it to this file", show_default=False)
    ] = None,
) -> None:
    """What happened to an episode, and to each of its tokens."""
    from tandem.cli import why

    why.why(run, episode, learning=learning, out=json)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="run folder", show_default=False)],
    b: Annotated[Path, typer.Argument(help="another", show_default=False)],
) -> None:
    """The first step, episode and token where two runs part (exit code 1), or that they are equal
    to the last bit."""
    from tandem.cli import diff

    sys.exit(diff.diff(a, b))


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Hugging Face model directory or hub name", show_default=False)
    ],
    host: Annotated[
        str, typer.Option(help="address to listen on; one that other machines reach needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_API_KEY", help="key that clients must send", show_default=False
        ),
    ] = "",
    served_name: Annotated[
        str, typer.Option(help="name of the model for clients; default: MODEL", show_default=False)
    ] = "",
    cache_mb: Annotated[int, typer.Option(min=1, help="budget of the key/value cache, MiB")] = 1024,
    max_batch: Annotated[int, typer.Option(min=1, help="most sequences decoded together")] = 64,
    max_queue: Annotated[
        int, typer.Option(min=1, help="most sequences that wait; more are refused with 429")
    ] = 256,
    max_new_tokens_default: Annotated[
        int, typer.Option(min=1, help="completion length of requests without max_tokens")
    ] = 256,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients: see docs/serving.md."""
    from tandem.cli import serve

    serve.serve(
        serve.Options(
            model=model,
            host=host,
            port=port,
            api_key=api_key,
            served_name=served_name,
            cache_mb=cache_mb,
            max_batch=max_batch,
            max_queue=max_queue,
            max_new_tokens=max_new_tokens_default,
        )
    )


@app.command()
def plan(
    recipe: Annotated[str | None, typer.Argument(help="TOML recipe")] = None,
    overrides: Overrides = None,
    command: Annotated[str, typer.Option("--for", help="train, sft, dpo, rm or distill")] = "train",
    keys: Annotated[
        bool,
        typer.Option("--keys", help="list every configuration key with its default and meaning"),
    ] = False,
) -> None:
    """Check whether a run could start (exit code 0, else 2): changed keys, data, memory, disk. No
    weights are loaded."""
    if keys or recipe is None:
        from tandem.cli import plan_keys

        plan_keys.show_keys()
        return
    config = load_config(recipe, overrides or [])
    from tandem.cli import plan

    sys.exit(plan.plan(config, command, run_folder(config, recipe, command)))


@app.command()
def doctor() -> None:
    """Check this machine: versions, exactness of the operators, reward workers, disk."""
    from tandem.cli import doctor

    sys.exit(doctor.doctor())


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)
