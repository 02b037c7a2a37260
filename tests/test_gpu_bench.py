"""`make gpu` without a GPU: what it says, that docs/gpu.md is made of docs/gpu.json, and that every
section runs."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import gpu
import gpu_proofs
import gpu_speed
from gpu_bench import Bench

from tandem.model.placement import CPU_FLOAT32, place_models
from tests.support.fake_cuda import MEMORY, FakeCuda
from tests.support.runs import prepare

TINY = Bench(CPU_FLOAT32, tiny=True)
WITH_PROCESSES = ("kernels", "resume", "learning", "step")
PEER = """
import pathlib

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens):
        assert temperature == 1.0 and ignore_eos
        self.max_tokens = max_tokens

class LLM:
    passes = []

    def __init__(self, folder, *, enforce_eager, max_model_len):
        files = {file.name for file in pathlib.Path(folder).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files

    def generate(self, prompts, sampling, *, use_tqdm):
        assert len(prompts) == len(sampling) == 4 and prompts not in self.passes
        self.passes.append(prompts)
"""


def measured(names):
    """The rows that a trial of the sections has measured, by section."""
    return {name: gpu.measured(TINY, gpu.SECTIONS[name])["rows"] for name in names}


def test_page_is_made_of_what_was_measured():
    assert gpu.PAGE.read_text() == gpu.page(gpu.everything())


def test_rows_without_a_measurement_say_so():
    lines = [line for line in gpu.page({}).splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith("| |")]
    assert len(rows) == sum(len(section.rows) for section in gpu.SECTIONS.values())
    assert all(set(row.split(" | ")[1:]) <= {"not measured", "not measured |"} for row in rows)


def test_a_figure_is_kept_beside_rows_that_are_missing():
    rows = {"Qwen3-0.6B": {"tokens/s": 12345.6, "MFU": 0.41}, "Qwen3-4B": {"MFU": "out of memory"}}
    found = {"rows": rows, "machine": "G", "versions": {"torch": "2"}, "date": "2026-01-01"}
    lines = gpu.section_lines(gpu.SECTIONS["training"], json.loads(json.dumps(found)))
    assert lines[6:] == [
        "| Qwen3-0.6B | 12,346 | 41% |",
        "| Qwen3-1.7B | not measured | not measured |",
        "| Qwen3-4B | not measured | out of memory |",
        "",
        "G; torch 2; 2026-01-01.",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_in_one_line(capsys):
    assert gpu.main([]) == 2
    [line] = capsys.readouterr().out.splitlines()
    parts = [part.split(":")[0] for part in line.split("; ")]
    assert parts == ["error", "found", "expected", "next"]


def test_an_unknown_section_is_named(capsys):
    assert gpu.main(["decoding"]) == 2
    assert capsys.readouterr().out.startswith("unknown section: decoding; there are kernels, ")


def test_every_section_of_one_process_measures_all_its_figures():
    names = [name for name in gpu.SECTIONS if name not in WITH_PROCESSES]
    for name, rows in measured(names).items():
        [figures] = rows.values()
        assert list(figures) == list(gpu.SECTIONS[name].columns)
        unknown = {column for column, figure in figures.items() if figure is None}
        # a CPU does not count the bytes of its tensors
        on_gpu = {"measured, GiB", "measured / plan"} if name == "memory" else set()
        assert unknown == (on_gpu if not torch.cuda.is_available() else set())
        if name == "parity":
            assert figures["largest log-prob gap"] == 0.0


def test_every_section_with_runs_of_its_own_measures_all_its_figures():
    found = measured(("resume", "learning", "step"))
    assert all(
        list(figures) == list(gpu.SECTIONS[name].columns) and None not in figures.values()
        for name, rows in found.items()
        for figures in rows.values()
    )
    assert found["resume"]["train"] == {"killed": 1, "resumed": 1, "byte-equal": 1}


def test_outcomes_are_those_of_pytests_last_line():
    text = "....\n=== 2 failed, 40 passed, 3 skipped, 1 warning, 2 errors in 61.02s (0:01:01) ===\n"
    assert gpu_proofs.outcomes(text) == {"passed": 40, "failed": 4, "skipped": 3}
    assert gpu_proofs.outcomes("7 tests collected in 4.02s") == dict.fromkeys(
        ("passed", "failed", "skipped"), 0
    )


def test_a_peer_that_is_not_there_is_named_and_one_that_is_there_is_run(tmp_path, monkeypatch):
    missing = gpu_speed.workload(TINY, "nanovllm")
    assert missing == {"output tokens/s": "nanovllm is not installed"}
    (tmp_path / "nanovllm.py").write_text(PEER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_speed.workload(TINY, "nanovllm")["output tokens/s"] > 0


def test_a_row_that_does_not_fit_the_device_leaves_the_others():
    def measure(bench, size):
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"tokens/s": 1.0}

    section = gpu.Section(
        title="", about="", measure=measure, columns={"tokens/s": ""}, rows={"a": (2,), "b": (1,)}
    )
    rows = gpu.measured(Bench(CPU_FLOAT32), section)["rows"]
    assert rows == {"a": {"tokens/s": "out of memory"}, "b": {"tokens/s": 1.0}}


def section_of(measure, **changes):
    rows = {name: (name,) for name in "abc"}
    return gpu.Section(
        title="", about="", measure=measure, columns={"ms": ".1f"}, rows=rows, **changes
    )


def test_a_row_that_fails_says_so_and_every_row_is_kept_at_once():
    def measure(bench, name):
        if name == "b":
            raise RuntimeError("no | such kernel\nTraceback of many lines")
        return {"ms": 1.0}

    kept = []
    found = gpu.measured(
        Bench(CPU_FLOAT32), section_of(measure), keep=lambda now: kept.append(len(now["rows"]))
    )
    failed = {"ms": "failed: no / such kernel"}
    assert found["rows"] == {"a": {"ms": 1.0}, "b": failed, "c": {"ms": 1.0}}
    assert kept == [1, 2, 3]
    assert "| b | failed: no / such kernel |" in gpu.section_lines(section_of(measure), found)


def test_rows_of_this_code_and_gpu_are_not_measured_again():
    asked = []

    def measure(bench, name):
        asked.append(name)
        return {"ms": 2.0}

    bench, section = Bench(CPU_FLOAT32), section_of(measure)
    before = gpu.new_section(bench) | {"rows": {"b": {"ms": 1.0}}, "seconds": 7}
    found = gpu.measured(bench, section, json.loads(json.dumps(before)))
    assert asked == ["a", "c"] and found["rows"]["b"] == {"ms": 1.0} and found["seconds"] >= 7
    for other in ("machine", "code", "versions"):
        asked.clear()
        assert gpu.measured(bench, section, before | {other: "x"})["rows"]["b"] == {"ms": 2.0}
        assert asked == ["a", "b", "c"]


def test_a_section_ends_after_its_limit_and_the_next_call_goes_on():
    def measure(bench, name):
        if name != "a":
            time.sleep(30)
        return {"ms": 1.0}

    bench, section = Bench(CPU_FLOAT32), section_of(measure, limit_s=0.2)
    first = gpu.measured(bench, section)
    assert first["rows"] == {"a": {"ms": 1.0}}
    second = gpu.measured(bench, section, first)
    assert second["rows"]["b"] == {"ms": "failed: more than 0.2 s"} and "c" not in second["rows"]


def test_a_gpu_that_takes_no_more_work_ends_the_process_after_the_row_is_kept():
    def measure(bench, name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kept = []
    with pytest.raises(SystemExit, match="start it again"):
        gpu.measured(Bench(CPU_FLOAT32), section_of(measure), keep=kept.append)
    assert list(kept[0]["rows"]) == ["a"]


def test_the_cache_of_a_step_leaves_room_for_what_the_updates_keep():
    with FakeCuda():
        bench = Bench(place_models("cuda", "auto"))
        assert bench.cache_mb(2_000_000_000) == int(0.8 * (MEMORY // 2 - 14 * 2_000_000_000)) >> 20
        assert bench.cache_mb(4_000_000_000) == 64


def test_a_run_that_is_measured_saves_nothing_and_one_that_ends_early_says_why(tmp_path):
    command = prepare(tmp_path, 3)
    gpu_speed.run_without_a_save([*command, "run.save_every=1000"], tmp_path / "run", 2)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert not (tmp_path / "run/hf").exists()
    with pytest.raises(RuntimeError, match="lists every key"):
        gpu_speed.run_without_a_save([*command, "rl.nothing=1"], tmp_path / "other", 2)
