"""Rows of benchmarks as problems, and the reward that grades each of them as its suite does.

Knows neither tokens nor models, nor the graders behind the names of rewards.

    tandem eval my.toml eval.data=suite:gsm8k,math500 reward=suite
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.schema import Config
from tandem.data.readers import SUITE, Payload, Placed, RowError, Source, source_files, source_rows
from tandem.registry import find
from tandem.rewards.load import Scorer, load
from tandem.rewards.parts import BadValue, checked_by
from tandem.types import Attempt, Problem

Values = dict[str, Any]


class Suite(NamedTuple):
    """A benchmark. `columns` makes the columns of a problem, `prompt`, `answer` and tests, from the
    values of a row and its number."""

    source: str  # on the hub
    columns: Callable[[Values, int], Values]
    reward: str  # "code": a program counts if it passes all tests
    check: Callable[[Config], None] = lambda _: None  # raises UserError if it cannot be graded here
    rows: Callable[[str, str], Placed] = source_rows  # of (a source, its key)
    files: Callable[[str, str], list[Path]] = source_files


def rows(source: Source, key: str) -> Placed:
    """Yield the rows of "suite:NAME,NAME=SOURCE", one suite after the other. Raises UserError."""
    for name, suite, place in _suites(str(source.path), key):
        for number, (where, payload) in enumerate(suite.rows(place, key), start=1):
            yield f", {name}{where}", _row(name, suite, payload, number)


def files(source: Source, key: str) -> list[Path]:
    """Return the files that the rows of the suites are in. Raises UserError."""
    suites = _suites(str(source.path), key)
    return [file for _, suite, place in suites for file in suite.files(place, key)]


def _suites(source: str, key: str) -> Iterator[tuple[str, Suite, str]]:
    """Yield name, suite and the source of its rows."""
    for item in source.removeprefix(SUITE).split(","):
        name, _, place = item.partition("=")
        suite: Suite = find("suites", name, key=key)
        yield name, suite, place or suite.source


def _row(name: str, suite: Suite, payload: Payload, number: int) -> Payload:
    if isinstance(payload, RowError):
        return payload
    values = payload[0]
    try:
        columns = suite.columns(values, number)
    except (KeyError, TypeError, AttributeError) as error:  # no such column, or one of another type
        found = f"columns {', '.join(list(values)[:8])} ({type(error).__name__}: {error})"
        return RowError(found, f"a row as in {suite.source}", next=f"look at {suite.source}")
    return {"uid": f"{name}/{number}", "data_source": name, "suite": name, **columns}, ""


def _load_graders(options: Mapping[str, Any]) -> None:
    for grader in options.get("graders", ()):
        load(grader, {})


@checked_by(_load_graders)
def reward(
    problem: Problem,
    completion: str,
    attempt: Attempt,
    *,
    otherwise: str = "",
    opened: bool = False,
    sandbox: Values = {},  # noqa: B006
    graders: list[str] = [],  # noqa: B006
) -> dict[str, float]:
    """Grade a row of a suite by the suite's own grader, and other rows by the reward `otherwise`.

    opened: the prompt opens the thoughts. sandbox: the config's section, for programs. graders: of
    the suites, loaded before the first row. Raises BadValue for a row that nothing grades.
    """
    if name := problem.metadata.get("suite"):
        suite: Suite = find("suites", name, key="the column suite")
        program = {"sandbox": sandbox, "all_or_nothing": True}
        scorer = load(suite.reward, program if suite.reward == "code" else {"opened": opened})
    elif otherwise:
        scorer = _other(otherwise)
    else:
        raise BadValue(
            f"problem {problem.uid!r} is of no suite; set reward.options.suite.otherwise"
        )
    value, parts = scorer(problem, attempt) or (0.0, {})
    return {**parts, "reward": value}


@cache
def _other(function: str) -> Scorer:
    return load(function, {})


def suite_options(config: Config) -> Values:
    """Return the options that a run gives the reward: the graders, and its sandbox if a suite needs
    one. Raises UserError for what a suite lacks here."""
    named = [s for s in (*config.data.sources, config.eval.data) if s.startswith(SUITE)]
    suites = [suite for source in named for _, suite, _ in _suites(source, "eval.data")]
    for suite in suites:
        suite.check(config)
    graders = sorted({suite.reward for suite in suites})
    sandbox = {"sandbox": config.sandbox.model_dump()} if "code" in graders else {}
    return {"graders": graders, **sandbox}
