"""The commands beside training: those that take a recipe, and those that read a run. The registry
has them by name."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from tandem.cli.arguments import Overrides, Recipe, Run, argument, unset
from tandem.config.recipe import load_config


def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, unset(help="FILE.jsonl, or a folder for Parquet files; default: runs/rollout")
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="start over; the old output is kept beside it")
    ] = False,
    keep: Annotated[
        str,
        unset(
            metavar="LOW:HIGH",
            help="also write the problems whose mean reward lies in that range, "
            "as <out>.kept.jsonl",
        ),
    ] = "",
) -> None:
    """Generate and score episodes of the training problems; the same command resumes."""
    config = load_config(recipe, overrides or [])
    from tandem.cli import rollout
    from tandem.cli.rollout_filter import parse_range

    rollout.rollout(config, out, fresh, parse_range(keep) if keep else None)


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="also write the metrics to this JSON file")] = None,
) -> None:
    """Evaluate a model on the held-out problems: sampled and greedy, by category."""
    config = load_config(recipe, overrides or [])
    from tandem.cli import eval

    eval.evaluate(config, out)


def export(
    run: Run,
    step: Annotated[int | None, Option(help="checkpoint to export; default: the newest")] = None,
    out: Annotated[
        Path | None, Option(help="target; default: <run>/hf/step_N, or <run>/adapter/step_N")
    ] = None,
    adapter: Annotated[
        bool, Option("--adapter", help="the LoRA adapter alone, in PEFT's format")
    ] = False,
    best: Annotated[
        bool, Option("--best", help="the best held-out reward's, of a run with eval.keep_best")
    ] = False,
    max_shard_size: Annotated[
        str, Option(help="a larger model becomes several files of that size, and an index")
    ] = "50GB",
    push: Annotated[
        str, unset(metavar="NAME", help="then upload it to the hub, as NAME or OWNER/NAME")
    ] = "",
) -> None:
    """Write a checkpoint as a Hugging Face directory for stock transformers and vLLM."""
    from tandem.cli.export import export_run

    export_run(
        run, step, out, adapter=adapter, best=best, push_to=push, max_shard_size=max_shard_size
    )


def replay(run: Run, step: Annotated[int, unset(help="as in metrics.jsonl, from 1 on")]) -> None:
    """Learn a step again: print that it is equal to the last bit, or the first difference."""
    from tandem.cli import replay

    sys.exit(replay.replay_step(run, step))


def status(run: Run) -> None:
    """Tell whether a run goes on, and who runs where and does what."""
    from tandem.cli.status import status

    status(run)


def scale(run: Run, count: Annotated[str, argument(help="rollout=N", metavar="rollout=N")]) -> None:
    """Have rollout workers join or leave a run that goes on, until there are N; its bits stay."""
    from tandem.cli.status import scale

    scale(run, count)


def show(
    run: Run,
    step: Annotated[int | None, unset(min=0, help="default: the newest")] = None,
    best: Annotated[bool, Option("--best", help="highest rewards first")] = False,
    worst: Annotated[bool, Option("--worst", help="lowest rewards first")] = False,
    count: Annotated[int, Option(min=1, help="how many")] = 4,
    held_out: Annotated[bool, Option("--eval", help="those of the step's evaluation")] = False,
) -> None:
    """Show episodes of a step: the conversation, the reward and its parts, and how it ended."""
    from tandem.cli import show

    show.show(run, step, best=best, worst=worst, count=count, held_out=held_out)


def why(
    run: Run,
    episode: Annotated[str, unset(help="STEP:UID:SAMPLE; or UID, or STEP, for a list")] = "",
    count: Annotated[int, Option(min=1, help="lines of a list at most")] = 40,
    learning: Annotated[
        bool, Option(help="replay the step that trained it, for advantages and ratios")
    ] = True,
    json: Annotated[Path | None, unset(help="also write all of it to this file")] = None,
) -> None:
    """Explain what happened to an episode, and to each of its tokens."""
    from tandem.cli import why

    why.why(run, episode, count, learning=learning, out=json)


def diff(
    a: Annotated[Path, argument(help="run folder")], b: Annotated[Path, argument(help="another")]
) -> None:
    """Find the first step, episode and token where two runs part (exit code 1)."""
    from tandem.cli import diff

    sys.exit(diff.diff(a, b))


def serve(
    model: Annotated[str, argument(help="Hugging Face model directory or hub name")],
    host: Annotated[
        str, Option(help="address to listen on; one that other machines reach needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = 8000,
    api_key: Annotated[str, unset(envvar="TANDEM_API_KEY", help="key that clients must send")] = "",
    served_name: Annotated[str, unset(help="name of the model for clients; default: MODEL")] = "",
    cache_mb: Annotated[int, Option(min=1, help="budget of the key/value cache, MiB")] = 1024,
    max_batch: Annotated[int, Option(min=1, help="most sequences decoded together")] = 64,
    max_queue: Annotated[
        int, Option(min=1, help="most sequences that wait; more are refused with 429")
    ] = 256,
    max_new_tokens_default: Annotated[
        int, Option(min=1, help="completion length of requests without max_tokens")
    ] = 256,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16")] = "auto",
    chat_template: Annotated[
        str, unset(help="Jinja file with the chat template, for a model without one")
    ] = "",
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="run the Python files of the model directory")
    ] = False,
    allow_weight_updates: Annotated[
        bool, Option(help="let clients have it load new weights, as `tandem train` does")
    ] = False,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients: see docs/guide/serving.md."""
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
            device=device,
            dtype=dtype,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
            allow_weight_updates=allow_weight_updates,
        )
    )
