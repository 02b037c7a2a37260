"""Reading problems: seconds and memory for 200,000 rows by format, how soon a mistake is told, what
a mixed step costs, and a training from its start to its first step with a million rows.

Each reading is a process of its own, so that its memory is its own. Only the training needs torch.

    python benchmarks/data.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from tandem.config.schema import Data
from tandem.data.mixture import Mixture, problems_of_step
from tandem.data.problems import read_problems
from tandem.runtime.errors import UserError

ROWS = 200_000
MANY = 1_000_000
RECIPE = """
[run]
folder = "run"
steps = 2
[model]
path = "model"
[data]
train = "rows.jsonl"
[rl]
prompts_per_step = 8
group_size = 4
[rollout]
max_new_tokens = 16
"""
READ = """
import sys, time
import pyarrow.parquet
from tandem.config.schema import Data
from tandem.data.problems import read_problems
def megabytes(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
before, start = megabytes(), time.perf_counter()
problems = read_problems(sys.argv[1], Data(), key="data.train")
seconds = time.perf_counter() - start
print(f"{seconds:.2f} s, {megabytes() - before:.0f} MB for {len(problems):,} problems")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in write_rows(Path(folder)):
            result = subprocess.run(
                [sys.executable, "-c", READ, path], capture_output=True, text=True, check=True
            )
            size = (
                sum(
                    file.stat().st_size
                    for file in [Path(path), *Path(path).glob("*")]
                    if file.is_file()
                )
                / 1e6
            )
            print(f"{Path(path).name:<10} {size:5.0f} MB   {result.stdout.strip()}", flush=True)
        for name, path in write_mistakes(Path(folder)).items():
            print(f"{name:<32} told after {time_of_error(path):.2f} s", flush=True)
    mixed_step()
    million_rows()


def write_rows(folder: Path) -> list[str]:
    """verl's rows of half a kilobyte; CSV has no objects, so there they are text."""
    rows = [
        {
            "data_source": "algebra",
            "prompt": [
                {"role": "user", "content": f"Solve {i} x + {i % 17} = {i * 3}. {'x' * 270}"}
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"uid": f"a/{i}", "split": "train", "index": i},
        }
        for i in range(ROWS)
    ]
    table = pa.Table.from_pylist(rows)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(table, folder / "a.parquet")
    save(folder / "folder", table)
    flat = [
        {"prompt": row["prompt"][0]["content"], "answer": str(i), "ability": "math"}
        for i, row in enumerate(rows)
    ]
    pyarrow.csv.write_csv(pa.Table.from_pylist(flat), folder / "a.csv")
    return [str(folder / name) for name in ("a.jsonl", "a.parquet", "folder", "a.csv")]


def save(folder: Path, table: pa.Table) -> None:
    """Write the rows as datasets' save_to_disk does."""
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')


def write_mistakes(folder: Path) -> dict[str, str]:
    good, huge = '{"prompt": "?", "answer": "2"}\n', "x" * 50_000_000
    files = {
        "a line of 50 MB, JSONL": ("l.jsonl", good + f'{{"prompt": "{huge}"}}\n'),
        "a line of 50 MB, CSV": ("l.csv", f"prompt,answer\n{huge},2\n"),
        "100,000 levels of nesting, JSONL": ("d.jsonl", good + "[" * 100_000 + "\n"),
        "last of 200,000 rows, JSONL": ("u.jsonl", good * ROWS + "{"),
    }
    for name, text in files.values():
        (folder / name).write_text(text)
    table = pa.table({"prompt": ["?", huge], "answer": ["2", "2"]})
    pq.write_table(table, folder / "l.parquet")
    save(folder / "long", table)
    arrow = {"a text of 50 MB, Parquet": "l.parquet", "a text of 50 MB, folder": "long"}
    return {
        what: str(folder / name)
        for what, name in [*((w, n) for w, (n, _) in files.items()), *arrow.items()]
    }


def time_of_error(path: str) -> float:
    start = time.perf_counter()
    try:
        read_problems(path, Data(), key="data.train")
    except UserError:
        return time.perf_counter() - start
    raise AssertionError(f"{path} was accepted")


def mixed_step() -> None:
    mixed = Mixture([range(ROWS)] * 4, [0.4, 0.3, 0.2, 0.1], "abcd")
    start = time.perf_counter()
    problems_of_step(mixed, 1000, 512, 0, True)
    print(
        f"a step of 512 out of 4 sources of {ROWS:,} rows: {(time.perf_counter() - start) * 1e3:.0f} ms"
    )


def million_rows() -> None:
    """A training of a tiny model, on short questions as text."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = (
            f'{{"prompt": "{i} + {i % 97} = ?", "answer": "{i + i % 97}"}}\n' for i in range(MANY)
        )
        (folder / "rows.jsonl").write_text("".join(rows))
        (folder / "recipe.toml").write_text(RECIPE)
        tandem = [sys.executable, "-m", "tandem"]
        subprocess.run([*tandem, "tiny", "model"], cwd=folder, check=True, capture_output=True)
        start = time.perf_counter()
        process = subprocess.Popen(
            [*tandem, "train", "recipe.toml"], cwd=folder, stdout=subprocess.DEVNULL
        )
        first = folder / "run" / "metrics.jsonl"
        while not (first.exists() and first.read_text()):
            if process.poll():
                raise SystemExit("the training failed")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.kill()
        process.wait()
    print(f"{MANY:,} rows, from the start of tandem train to its first step: {seconds:.1f} s")


if __name__ == "__main__":
    main()
