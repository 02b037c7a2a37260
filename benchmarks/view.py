"""`tandem view` over a large run: first paint, search, a live update, in headless Chromium.

    python -m benchmarks.view [--steps 2000] [--episodes 50] [--out FILE.json]

Makes a run of `steps` steps with `episodes` episodes each (of real length: 30 to 120 words), serves
it and measures, medians of REPEATS but for the first visit:

    first paint    from the address to the browser's first paint with content, a fresh browser
    drawn          until the page has what it is for: rows of a list, lines of every chart
    read           all files of episodes, from the first request of a list to the last
    search         one request for a page of episodes by a text, and by a text and filters
    rows read      the first request for curves of a run of ROWS_OF_LONG rows
    zoom           one request for ten columns of that run, thinned
    long           its curves in a browser: drawn; zoomed by a drag; smoothed by the slider
    live           from the row's write to the new row in the page

With --pictures it only renews the two pictures of the README, from the runs of a demo (look at
each before it is committed):

    tandem demo && python -m benchmarks.view --pictures runs

Prints a JSON object; the exit status is 1 where a bar of BARS is missed. Needs chromium and
chromium-driver.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tandem.runtime import numerics
from tests.support.browser import browser
from tests.support.viewing import add_step, group, make_run, viewing

REPEATS = 7
ROWS_OF_LONG = 100_000
COLUMNS = ["reward", "ratio", "grad_norm", *(f"column/{n}" for n in range(20))]
BARS = {"first paint": 1.0, "search": 0.2, "live": 1.0}  # seconds
WORDS = [
    "so",
    "we",
    "add",
    "seven",
    "to",
    "both",
    "sides",
    "and",
    "divide",
    "by",
    "three",
    "then",
    "check",
    "the",
    "answer",
    "again",
    "maybe",
    "not",
    "sure",
    "it",
    "is",
    "x",
    "equals",
]
PAINT = "const p = performance.getEntriesByName('first-contentful-paint')[0]; return p ? p.startTime : 0"
IMAGES = Path(__file__).parents[1] / "docs/images"
RUN, SHOWN_STEP = "demo%2Ftrain", 10
PICTURES = {  # name -> address, when it is drawn, width, height, whether dark
    "curves": (
        f"curves/{RUN}",
        "return document.querySelectorAll('.u-wrap canvas').length >= 8",
        *(1440, 900, False),
    ),
    "episode": (
        f"episode/{RUN}/train/{SHOWN_STEP}/ROW",
        "return document.querySelectorAll('.token').length > 0 && document.querySelectorAll('.peer').length === 8",
        *(1440, 900, True),
    ),
}
ROWS = "return document.querySelectorAll('[data-row]').length"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="RUNS", help="folder with demo/train")
    args = parser.parse_args()
    if args.pictures:
        take_pictures(args.pictures)
        return 0
    with tempfile.TemporaryDirectory() as place:
        run = make_run(Path(place) / "large", steps=args.steps + 1)
        start = time.perf_counter()
        write_steps(run, args.steps, args.episodes)
        print(f"written in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        with viewing(Path(place)) as url:
            row = {
                "date": date.today().isoformat(),
                "processor": numerics.processor(),
                "steps": args.steps,
                "episodes": args.steps * args.episodes,
                **first_visits(url),
                "live": live(url, run, args.steps + 1),
            }
        write_rows(Path(place) / "long")
        with viewing(Path(place)) as url:  # another one, which has read nothing
            row |= searches(url) | curves_of_long(url)
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")
    return any(row[name] > bar for name, bar in BARS.items())


def take_pictures(runs: Path) -> None:
    """Write the pictures of the README: curves, light; an episode, dark."""
    with viewing(runs) as url, browser() as page:
        for name, (path, ready, width, height, dark) in PICTURES.items():
            page.resize(width, height, dark=dark)
            page.open(f"{url}/#/{path.replace('ROW', mixed_row(url))}")
            page.until(ready)
            time.sleep(1.0)  # the last chart is drawn a frame later
            file = IMAGES / f"view-{name}.png"
            page.picture(file)
            Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)


def mixed_row(url: str) -> str:
    """Return the row of a failed attempt at a problem that others have solved."""
    asked = {"run": "demo/train", "step": SHOWN_STEP}
    groups = httpx.get(f"{url}/api/step", params=asked, timeout=60).json()["groups"]
    mixed = [g["attempts"] for g in groups if g["kind"] == "train" and g["outcome"] == "train"]
    attempts = max(mixed, key=lambda a: min(sum(x["reward"] > 0.5 for x in a), 4))
    return str(min(attempts, key=lambda x: (x["reward"], -x["tokens"]))["row"])


def write_steps(run: Path, steps: int, episodes: int) -> None:
    draws = random.Random(0)
    for step in range(1, steps + 1):
        groups = [
            group(
                f"algebra/{draws.randrange(5000)}",
                [" ".join(draws.choices(WORDS, k=draws.randint(30, 120))) for _ in range(10)],
                [float(draws.random() < step / steps) for _ in range(10)],
                prompt=f"Solve {draws.randrange(99)}x + {draws.randrange(99)} = {draws.randrange(999)}",
            )
            for _ in range(episodes // 10)
        ]
        numbers = {f"reward_part/{n}": draws.random() for n in range(12)}
        add_step(
            run,
            step,
            groups,
            reward=step / steps,
            entropy=2 - step / steps,
            ratio=1.0,
            clip_share=0.01,
            grad_norm=draws.random(),
            learn_s=1.0,
            **numbers,
        )


def write_rows(folder: Path) -> None:
    """Write a run of many rows and no episodes."""
    draws = random.Random(1)
    make_run(folder, steps=ROWS_OF_LONG)
    rows = (
        {"step": n, "entropy": draws.random(), **{k: draws.random() for k in COLUMNS}}
        for n in range(1, ROWS_OF_LONG + 1)
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def first_visits(url: str) -> dict[str, float]:
    """Open each page in a browser of its own; the server has read nothing before the first."""
    pages = {
        "": f"{ROWS} === 1",
        "episodes/large": f"{ROWS} === 200",
        "curves/large": "return document.querySelectorAll('.u-wrap canvas').length >= 3",
        "step/large/1000": "return document.querySelectorAll('.square').length > 0",
    }
    found, paints = {}, []
    for path, ready in pages.items():
        with browser() as page:
            start = time.perf_counter()
            page.open(f"{url}/#/{path}")
            page.until(ready)
            found[f"drawn: {path or 'runs'}"] = round(time.perf_counter() - start, 3)
            paints.append(page.run(PAINT) / 1000)
    return {"first paint": round(max(paints), 3), **found}


def searches(url: str) -> dict[str, float]:
    queries = {
        "text": {"q": "MAYBE not sure it"},
        "none": {"q": "zebra"},
        "text, reward, steps": {
            "q": "check",
            "reward_from": "0.5",
            "step_from": "500",
            "sort": "-tokens",
        },
    }
    with httpx.Client(base_url=url, timeout=60) as client:
        start = time.perf_counter()
        while not client.get("/api/episodes", params={"run": "large"}).json()["complete"]:
            pass
        read = time.perf_counter() - start
        times = {
            name: statistics.median(
                timed(client, "episodes", {"run": "large", **query}) for _ in range(REPEATS)
            )
            for name, query in queries.items()
        }
        asked = [("key", name) for name in COLUMNS[:10]] + [("from", "20000"), ("to", "70000")]
        first_zoom = timed(client, "series", [("run", "long"), *asked])
        times_of_zoom = [timed(client, "series", [("run", "long"), *asked]) for _ in range(REPEATS)]
    return {
        "read": round(read, 3),
        "rows read": round(first_zoom, 3),
        "zoom": round(statistics.median(times_of_zoom), 4),
        "search": round(max(times.values()), 4),
        **{f"search: {n}": round(t, 4) for n, t in times.items()},
    }


def curves_of_long(url: str) -> dict[str, float]:
    """Open the curves of the long run and measure the seconds until they are drawn, zoomed by a
    drag over a quarter of a chart, and smoothed; medians but for the first."""
    inside = "const b = document.querySelector('.u-over').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    whole = "[...document.querySelectorAll('.bar button')].every((b) => b.hidden)"
    slide = "const s = document.querySelector('input[type=range]'); s.value = {}; s.dispatchEvent(new Event('input')); document.querySelector('canvas').toDataURL()"
    zooms, slides = [], []
    with browser() as page:
        start = time.perf_counter()
        page.open(f"{url}/#/curves/long")
        page.until("return document.querySelectorAll('.u-wrap canvas').length >= 4")
        drawn = time.perf_counter() - start
        for place in range(REPEATS):
            left, top, width, height = page.run(inside)
            x, y = left + width * (0.1 + 0.05 * place), top + height / 2
            start = time.perf_counter()
            for kind, at in (
                ("mousePressed", x),
                ("mouseMoved", x + width / 4),
                ("mouseReleased", x + width / 4),
            ):
                page.mouse(kind, at, y)
            page.until(f"return !{whole}")
            zooms.append(time.perf_counter() - start)
            for kind in ("mousePressed", "mouseReleased"):
                page.mouse(kind, x, y, clickCount=2)
            page.until(f"return {whole}")
        for place in range(REPEATS):
            start = time.perf_counter()
            page.run(slide.format(0.1 + place / 10))
            slides.append(time.perf_counter() - start)
    return {
        "long: drawn": round(drawn, 3),
        "long: zoomed": round(statistics.median(zooms), 3),
        "long: smoothed": round(statistics.median(slides), 3),
    }


def timed(client: httpx.Client, name: str, query: Any) -> float:
    start = time.perf_counter()
    client.get(f"/api/{name}", params=query).raise_for_status()
    return time.perf_counter() - start


def live(url: str, run: Path, first: int) -> float:
    """Measure the median seconds from a step's row to the step in the list of runs."""
    delays = []
    with browser() as page:
        page.open(f"{url}/")
        page.until(f"{ROWS} === 1")
        for step in range(first, first + REPEATS):
            add_step(run, step, [group("new", ["text"], [1.0])], reward=0.5)
            start = time.perf_counter()
            page.until(f"return document.querySelector('td.c3').textContent.startsWith('{step:,}')")
            delays.append(time.perf_counter() - start)
    return round(statistics.median(delays), 3)


if __name__ == "__main__":
    sys.exit(main())
