"""`tandem report` and `tandem plot`: a run as one HTML file, and curves of runs as SVG.

    runs/demo/train --> report.html: what it is, its curves, episodes of its last step, and of its
                        evaluations before and after

The file needs nothing beside it and runs no script. All texts of a model are escaped, characters
that are not printed too. It does not know the pages of `tandem view`.
"""

import difflib
import json
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from tandem.plugins.view.episode import read_image
from tandem.plugins.view.runs import Run
from tandem.plugins.view.svg import Line, Panel, figure
from tandem.run_folder.episode_files import episode_file
from tandem.run_folder.samples import Sample, printable, read_samples
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import images_of, message_text

CHARTS_FILE = Path(__file__).parent / "static" / "charts.json"
POINTS = 600  # of a line
CHOSEN = 3  # episodes of a kind
LONGEST = 6000  # characters of a message
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2330;--dim:#5b6472;--line:#e6e9ee;--card:#f7f8fa}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e6e9ef;--dim:#98a2b3;--line:#2a313c;
--card:#1a2028}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;max-width:960px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2.2rem 0 .6rem}
svg,img{max-width:100%;height:auto}
.dim{color:var(--dim)}dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));
gap:.8rem;margin:1.2rem 0}dt{color:var(--dim);font-size:.8rem}dd{margin:0;font-size:1.15rem}
article{border:1px solid var(--line);border-radius:8px;margin:.8rem 0;overflow:hidden}
article>p{margin:0;padding:.5rem .8rem;background:var(--card);font-size:.85rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:.5rem .8rem;
font:13px/1.5 ui-monospace,monospace;border-top:1px solid var(--line);unicode-bidi:isolate}
pre b{color:var(--dim);font-weight:500}
"""


def panels(runs: Sequence[Run], keys: Sequence[str] = ()) -> list[Panel]:
    """Return a chart for each of the keys, or the standard ones that the runs have numbers for.
    Raises UserError for a key that no run has."""
    standard: list[dict[str, Any]] = json.loads(CHARTS_FILE.read_text())
    own: list[dict[str, Any]] = [{"title": key, "keys": [key]} for key in keys]
    charts = own or standard
    names = {name for run in runs for name in run.names()}
    if unknown := [key for key in keys if key not in names]:
        key = unknown[0]
        near = sorted(name for name in names if name.endswith(f"_{key}"))
        near = near or difflib.get_close_matches(key.lower(), sorted(names), 1, 0.5)
        raise UserError(
            "no run has such numbers",
            where="--key",
            found=key,
            expected=", ".join(sorted(names)) or "a run with a row in metrics.jsonl",
            next=f"did you mean {' or '.join(near)}?" if near else "name one of them",
        )
    drawn = [
        Panel(title=one["title"], lines=_lines(runs, one["keys"], one.get("band", "")))
        for one in charts
    ]
    return [panel for panel in drawn if panel.lines]


def _lines(runs: Sequence[Run], keys: Sequence[str], band: str) -> list[Line]:
    """Return a line for each run and key; band: the key of the interval around the first one."""
    found = []
    for run in runs:
        for key in keys:
            series, short = run.series(key, points=POINTS), key.rpartition("/")[2]
            label = short if len(runs) == 1 else run.name
            label += f" {short}" if len(runs) > 1 and len(keys) > 1 else ""
            if series["x"]:
                around = run.series(band, points=POINTS) if band and key == keys[0] else {"x": []}
                half = around["y"] if around["x"] == series["x"] else ()
                found.append(Line(label=label, x=series["x"], y=series["y"], half=half))
    return found


def report(run: Run) -> str:
    """Write the HTML file of a run. Raises UserError for damaged episodes."""
    summary = run.summary()
    title = f"{run.name}: tandem {summary['command']}"
    drawn = panels([run])
    flat = [f"{one.title} {one.lines[0].y[0]:g}" for one in drawn if one.is_constant]
    curves = "".join(figure([one]) for one in drawn if not one.is_constant)
    about = [summary[name] for name in ("command", "algorithm", "state", "model", "machine")]
    about += [f"{summary['size']:,} trained parameters" * bool(summary["size"])]
    about += [f"begun {summary['created']}, last written {summary['written']}"]
    notes = [f"failed: {summary['failed']}"] * bool(summary["failed"]) + summary["warnings"]
    values = run.config_values().items()
    config = "\n".join(f"{name} = {json.dumps(value, default=str)}" for name, value in values)
    sections = [
        f"<h1>{_text(run.name)}</h1><p class=dim>{_text(' · '.join(filter(None, about)))}</p>",
        _figures(summary),
        *(f"<article><p>{_text(note)}</p></article>" for note in notes),
        f"<h2>Curves</h2>{curves or '<p>It has made no step yet.</p>'}",
        *([f"<p class=dim>Constant: {', '.join(flat)}</p>"] if flat else []),
        *_episode_sections(run),
        "<h2>Configuration</h2><details><summary>every key</summary>",
        f"<pre>{_text(config)}</pre></details>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _figures(summary: dict[str, Any]) -> str:
    held_out, interval = summary["held_out"], summary["interval"] or 0
    ends = [] if held_out is None else [f"{summary['held_out_first']:.3f}", f"{held_out:.3f}"]
    rows = {
        "step": f"{summary['step']} of {summary['steps']}",
        summary["what"]: _number(summary["reward"]),
        "held-out reward": f"{' → '.join(ends)} ± {interval:.3f}" if ends else "",
        "seconds a step": _number(summary["step_s"]),
        "tokens a second": _number(summary["tokens_s"]),
        "failed episodes": str(summary["errors"]),
    }
    cells = [f"<div><dt>{_text(n)}</dt><dd>{_text(v)}</dd></div>" for n, v in rows.items() if v]
    return f"<dl>{''.join(cells)}</dl>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _episode_sections(run: Run) -> list[str]:
    folder = run.folder / "episodes"
    steps = {
        kind: sorted(int(path.stem[-6:]) for path in folder.glob(f"{kind}_step_??????.parquet"))
        for kind in ("train", "eval_greedy", "eval_sampled")
    }
    found = []
    if steps["train"]:
        last = steps["train"][-1]
        samples = sorted(
            read_samples(episode_file(folder, last)), key=lambda one: one.episode.reward
        )
        for name, chosen in (("Best", samples[::-1]), ("Worst", samples)):
            found.append(_section(run, f"{name} of step {last}", chosen[:CHOSEN]))
    kind = "eval_greedy" if steps["eval_greedy"] else "eval_sampled"
    if len(steps[kind]) > 1:
        first, last = steps[kind][0], steps[kind][-1]
        before, after = (
            {(s.name.partition(":")[2]): s for s in read_samples(episode_file(folder, step, kind))}
            for step in (first, last)
        )
        both = [name for name in after if name in before]
        gains = {name: after[name].episode.reward - before[name].episode.reward for name in both}
        both.sort(key=lambda name: -abs(gains[name]))
        pairs = [sample for name in both[:CHOSEN] for sample in (before[name], after[name])]
        title = f"Held-out problems, before (step {first}) and after (step {last})"
        found.append(_section(run, title, pairs))
    return found


def _section(run: Run, title: str, samples: Sequence[Sample]) -> str:
    return f"<h2>{_text(title)}</h2>{''.join(_article(run, sample) for sample in samples)}"


def _article(run: Run, sample: Sample) -> str:
    messages = ""
    for message in sample.episode.chat(sample.group.problem):
        text = _text(message_text(message)[:LONGEST])
        messages += f"<pre><b>{_text(message['role'])}</b> {text}</pre>"
        for name in images_of([message]):
            with suppress(KeyError):
                data, kind = read_image(run, name)
                source = f"data:{kind};base64,{b64encode(data).decode()}"
                messages += f'<img alt="{_text(name)}" src="{source}">'
    answer = sample.group.problem.answer
    notes = [f"expected answer: {answer}"] * bool(answer)
    notes += [f"error: {error}" for error in sample.errors]
    lines = "".join(f"<br>{_text(note)}" for note in notes)
    heading = f"<b>{_text(sample.name)}</b> <span class=dim>{_text(sample.summary)}</span>{lines}"
    return f"<article><p>{heading}</p>{messages}</article>"


def _text(value: str) -> str:
    """Escape a text for HTML; characters that are not printed become visible escapes."""
    return escape(printable(value))
