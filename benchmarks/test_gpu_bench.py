"""`make gpu` without a GPU: what it says, that results/gpu.md is made of results/gpu.json, and that every
section runs."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpu
from gpu_bench import Bench

from tandem.model.placement import CPU_FLOAT32

TINY = Bench(CPU_FLOAT32, tiny=True)
WITH_PROCESSES = ("kernels", "resume", "learning", "step")


def measured(names):
    """The rows that a trial of the sections has measured, by section."""
    return {name: gpu.measured(TINY, gpu.SECTIONS[name])["rows"] for name in names}


def test_page_is_made_of_what_was_measured():
    assert gpu.PAGE.read_text() == gpu.page(gpu.everything())


def test_rows_without_a_measurement_say_so():
    lines = [line for line in gpu.page({}).splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith("| |")]
    rows = rows[: sum(len(section.rows) for section in gpu.SECTIONS.values())]
    assert all(set(row.split(" | ")[1:]) <= {"not measured", "not measured |"} for row in rows)


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
    assert found["resume"]["train, after step 1"] == {"killed": 1, "resumed": 1, "byte-equal": 1}


def test_the_step_of_a_plain_loop_has_the_figures_of_tandems():
    figures = gpu.speed.rl_step(TINY, "Qwen3-0.6B", plain=True)
    assert list(figures) == list(gpu.SECTIONS["step"].columns) and all(figures.values())


def test_prompts_of_staggered_lengths_are_decoded():
    figures = gpu.speed.decode(TINY, "Qwen3-0.6B", 4, gpu.STAGGERED)
    assert list(figures) == list(gpu.SECTIONS["decode"].columns) and all(figures.values())


def test_the_names_of_failed_tests_are_kept():
    output = (
        "FAILED tests/gpu/test_a.py::test_b[3] - AssertionError\n== 1 failed, 2 passed in 6s =="
    )
    found = gpu.proofs.outcomes(output)
    assert found == {"passed": 2, "failed": 1, "skipped": 0, "which failed": "test_a.py::test_b[3]"}


def test_the_test_that_the_page_names_counts_launches():
    texts = (path.read_text() for path in (gpu.ROOT / "tests/gpu").glob("*.py"))
    assert any(f"def {gpu.COUNTED}(" in text for text in texts)


def test_rows_and_seconds_are_chosen_and_results_go_to_a_folder(tmp_path, monkeypatch):
    asked = []

    def measure(bench, name):
        asked.append(name)
        return {"ms": 1.0}

    monkeypatch.setitem(gpu.SECTIONS, "memory", section_of(measure))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "place_models", lambda *names: CPU_FLOAT32)
    words = ["memory", "--rows", "b", "--limit", "9", "--out", str(tmp_path / "new")]
    assert gpu.main(words) == 0 and gpu.main(words) == 0
    assert asked == ["b"]  # what is there is not measured again
    assert "| b | 1.0 |" in (tmp_path / "new" / "gpu.md").read_text()


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


def test_a_gpu_that_takes_no_more_work_ends_the_process_after_the_row_is_kept():
    def measure(bench, name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kept = []
    with pytest.raises(SystemExit, match="start it again"):
        gpu.measured(Bench(CPU_FLOAT32), section_of(measure), keep=kept.append)
    assert list(kept[0]["rows"]) == ["a"]
