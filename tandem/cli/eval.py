"""`tandem eval`: the engine without the trainer, on the held-out problems."""

import json
from pathlib import Path

from rich.table import Table

from tandem.cli.progress import console
from tandem.config.schema import Config
from tandem.data.renderer import load_renderer
from tandem.jobs.parts import build_generator, evaluator, playground, prepare_process, read_data
from tandem.model.load import check_model
from tandem.runtime.errors import UserError


def evaluate(config: Config, out: Path | None) -> dict[str, float]:
    if out is not None and not out.parent.is_dir():
        raise UserError(
            "the folder of the result does not exist",
            where=str(out.parent),
            expected="a folder",
            next=f"mkdir -p {out.parent}",
        )
    prepare_process(config)
    problems = read_data(config, "eval.data")
    if not problems:
        raise UserError(
            "no held-out problems are named",
            where="eval.data",
            expected="a JSONL or Parquet file",
            next="add eval.data=FILE",
        )
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    problems = renderer.check_lengths(problems, config.data, key="eval.data")
    with playground(config) as player_of:
        player = player_of(build_generator(config, renderer, problems, console.print), renderer)
        metrics = evaluator(config, problems, player, renderer.stop_token_ids, None)(0)
    table = Table("metric", "value", title=f"{config.model.path} on {len(problems)} problems")
    for name, value in metrics.items():
        table.add_row(name.removeprefix("eval/"), f"{value:.3f}")
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics
