"""The reward function `code`: the share of a problem's tests that a completion's program passes.

The program runs in a sandbox that no expected value ever enters. Its results are text or plain
data, compared here. So it gains nothing by printing "passed", exiting with 0, replacing builtins or
returning an object that equals everything. code_tests.py reads the tests.

An assert of `call == constant`, of literals, is a function call with an expected value. Any other
script runs in a sandbox of its own beside the solution's, and reaches the solution by messages only
(code_tester.py); that needs a sandbox on this machine. MBPP's `test_imports` and `test_setup_code`
come before each script. Knows neither models nor training, and only the Protocol of the sandbox.
"""

import json
import math
import re
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from tandem.config.episodes import Sandbox as SandboxConfig
from tandem.config.schema import Config
from tandem.plugins.graders.code_inside import decode, encode
from tandem.plugins.graders.code_tests import (
    CallTest,
    Columns,
    IoTest,
    Script,
    Test,
    across_the_line,
    elsewhere,
    extract_code,
    imports_solution,
    judges,
    made,
    read_tests,
    unlimited_digits,
)
from tandem.plugins.graders.sandbox.local import LocalSandbox
from tandem.plugins.graders.sandbox.protocol import Limits, Sandbox, open_sandbox
from tandem.runtime.errors import UserError
from tandem.types import Problem

ANSWER_BYTES = 2**20  # of a process's output, beyond that of a right one
PRINTED = 1e-6  # the tolerance of judges, absolute or relative, between printed floats
FLOAT_CHARS = 24  # a longer decimal is meant digit by digit
_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?([eE][-+]?\d+)?(?![\w.])")
_PROGRAM = ("python", "-X", "int_max_str_digits=0", "main.py")
_SOLVE, _TEST = ("python", "-S", "code_inside.py"), ("python", "-S", "code_tester.py")


def code_reward(
    problem: Problem,
    completion: str,
    *,
    sandbox: dict[str, Any] | Sandbox = {},  # noqa: B006
    timeout_s: float = 4.0,
    test_timeout_s: float = 2.0,
    memory_mb: int = 1024,
    all_or_nothing: bool = False,
    tolerance: float | None = None,
) -> dict[str, float]:
    """Score a program: the reward is the share of tests passed, or 1 only if all are.

    Parts: `passed`, that share, `tests`, their number, and `output_cut`, the number of processes
    that were stopped because they wrote too much.
    sandbox: the config's section, or an open one.
    timeout_s: wall clock of all tests together; tests not reached have failed, so keep it below
    reward.timeout_s.
    test_timeout_s: wall clock of one process.
    tolerance: absolute or relative, between numbers; None: 1e-6 between printed floats, else 0.
    Raises UserError for a problem without readable tests, SandboxFailed if the sandbox did not
    work.
    """
    tests, columns = read_tests(problem)
    limits = Limits(
        wall_s=test_timeout_s,
        cpu_s=math.ceil(timeout_s),
        memory_mb=memory_mb,
        output_bytes=ANSWER_BYTES,
    )
    run = _TestRun(
        uid=problem.uid,
        code=extract_code(completion),
        columns=columns,
        sandbox=open_sandbox(SandboxConfig(**sandbox)) if isinstance(sandbox, dict) else sandbox,
        limits=limits,
        deadline=time.monotonic() + timeout_s,
        tolerance=tolerance,
    )
    share = sum(run.passed(tests, all_or_nothing)) / len(tests)
    return {
        "reward": float(share == 1) if all_or_nothing else share,
        "passed": share,
        "tests": float(len(tests)),
        "output_cut": float(run.stops.count("output")),
    }


def code_options(config: Config) -> dict[str, Any]:
    """Return the options that a run gives the reward."""
    return {"sandbox": config.sandbox.model_dump()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TestRun:
    """One program and its tests. deadline: of time.monotonic, for all tests."""

    uid: str
    code: str
    columns: Columns
    sandbox: Sandbox
    limits: Limits
    deadline: float
    tolerance: float | None
    stops: list[str] = field(default_factory=list)  # why each process ended

    def passed(self, tests: Sequence[Test], all_or_nothing: bool) -> list[bool]:
        """Run the tests, kind by kind, and return for each whether it passed.

        all_or_nothing: only all together count, so the first failure ends it.
        """
        calls = [test for test in tests if isinstance(test, CallTest)]
        scripts = [test.text for test in tests if isinstance(test, Script)]
        verdicts = self._run_calls(calls, all_or_nothing)
        if scripts and (all(verdicts) or not all_or_nothing):
            verdicts += self._run_scripts(scripts)
        for test in tests:
            if isinstance(test, IoTest) and (all(verdicts) or not all_or_nothing):
                verdicts.append(self._run_program(test))
        return verdicts

    def _next_limits(self, right_bytes: int = 0) -> Limits | None:
        """Return the limits of the next run; None if there is no time for one. right_bytes: of the
        output that passes."""
        left = self.deadline - time.monotonic()
        limits = replace(self.limits, wall_s=min(left, self.limits.wall_s))
        return replace(limits, output_bytes=ANSWER_BYTES + right_bytes) if left > 0 else None

    def _run_program(self, test: IoTest) -> bool:
        limits = self._next_limits(len(test.output.encode()))
        if limits is None:
            return False
        files = {"main.py": self.code}
        result = self.sandbox.run(_PROGRAM, files=files, stdin=test.input, limits=limits)
        self.stops.append(result.stop_reason)
        return result.exit_code == 0 and same_output(result.stdout, test.output, self.tolerance)

    def _run_calls(self, tests: Sequence[CallTest], all_or_nothing: bool) -> list[bool]:
        """Make all calls in one process; after a call that hangs, those behind it in another, while
        there is time."""
        verdicts: list[bool] = []
        right_bytes = sum(map(reply_bytes, tests))
        while len(verdicts) < len(tests) and (limits := self._next_limits(right_bytes)):
            left = tests[len(verdicts) :]
            requests = "".join(json.dumps(["eval", [test.expression]]) + "\n" for test in left)
            files = self._solver_files()
            result = self.sandbox.run(_SOLVE, files=files, stdin=requests, limits=limits)
            self.stops.append(result.stop_reason)
            # a reply is trusted to be a value, and no more
            replies = zip(left, result.stdout.split("\n")[:-1], strict=False)
            verdicts += [holds(test, reply, self.tolerance or 0.0) for test, reply in replies]
            if result.stop_reason != "timeout" or all_or_nothing:
                break
            verdicts.append(False)  # the one that took the time
        return (verdicts + [False] * len(tests))[: len(tests)]

    def _run_scripts(self, scripts: Sequence[str]) -> list[bool]:
        """Run scripts and solution in two sandboxes; the verdicts come on a stream that the
        solution does not have."""
        if not isinstance(self.sandbox, LocalSandbox):
            found = "needs a sandbox on this machine: it is more than asserts of call == constant"
            raise self._cannot_run(scripts[0], found)
        limits = self._next_limits()
        if limits is None:
            return [False] * len(scripts)
        tester, solver = (_TEST, self._tester_files(scripts)), (_SOLVE, self._solver_files())
        result, other = self.sandbox.converse(tester, solver, limits=limits)
        self.stops.extend((result.stop_reason, other.stop_reason))
        if result.exit_code != 0:
            return [False] * len(scripts)
        reports = json.loads(result.stderr)
        for script, report in zip(scripts, reports, strict=True):
            if report["unsupported"]:
                raise self._cannot_run(script, report["unsupported"])
        return [report["passed"] for report in reports]

    def _cannot_run(self, script: str, found: str) -> UserError:
        return UserError(
            "a test script cannot run, whatever the solution",
            where=f"problem {self.uid}: {script.strip()[:200]}",
            found=found,
            expected="Python's own library, and names of a solution in another process",
            next="mend the row, or leave it out; see docs/guide/sandbox.md",
        )

    def _tester_files(self, scripts: Sequence[str]) -> dict[str, str]:
        helpers = self.columns.helpers
        with unlimited_digits():
            for script in scripts:
                if found := elsewhere(script):
                    raise self._cannot_run(script, found)
            prepared = [
                {
                    "text": across_the_line(script),
                    "made": sorted(made(script)),
                    "judges": sorted(judges(script, helpers)),
                    "imports": imports_solution(script),
                }
                for script in scripts
            ]
        tests = {"scripts": prepared, "before": helpers, "entry_point": self.columns.entry_point}
        sources = {**_source("code_inside.py"), **_source("code_tester.py")}
        return {**sources, "tests.json": json.dumps(tests)}

    def _solver_files(self) -> dict[str, str]:
        types = sorted(set(re.findall(r"\w+", self.code)) & set(typing.__all__))
        imports = [f"from typing import {name}" for name in types]
        before = [*self.columns.imports.splitlines(), *imports, *self.columns.helpers]
        program = {"before.json": json.dumps(before), "solution.py": self.code}
        return {**_source("code_inside.py"), **program}


@cache
def _source(program: str) -> dict[str, str]:
    return {program: Path(__file__).with_name(program).read_text(encoding="utf-8")}


# ---------------------------------------------------------------- comparison, outside any sandbox
# A reply is trusted to be text, or plain data in the JSON of code_inside.py, and no more.


def same_output(found: str, expected: str, tolerance: float | None = None) -> bool:
    """Compare lines, without spaces at their ends and empty lines at the end.

    tolerance: absolute or relative, between numbers at the same place of the same text; None:
    PRINTED, and only where both are floats.
    """
    one, other = (
        [line.rstrip() for line in text.rstrip().split("\n")] for text in (found, expected)
    )
    return len(one) == len(other) and all(
        a == b or (tolerance != 0 and _same_line(a, b, tolerance))
        for a, b in zip(one, other, strict=True)
    )


def _same_line(found: str, expected: str, tolerance: float | None) -> bool:
    if _NUMBER.sub("0", found) != _NUMBER.sub("0", expected):
        return False
    for one, other in zip(_NUMBER.finditer(found), _NUMBER.finditer(expected), strict=True):
        floats = (one[1] or one[2]) and (other[1] or other[2])
        if tolerance is None and (not floats or max(len(one[0]), len(other[0])) > FLOAT_CHARS):
            same = one[0] == other[0]
        else:
            same = _close(
                float(one[0]), float(other[0]), PRINTED if tolerance is None else tolerance
            )
        if not same:
            return False
    return True


def _close(found: float, expected: float, tolerance: float) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def reply_bytes(test: CallTest) -> int:
    """Return the size that no right reply passes."""
    return 4096 + 8 * max(len(json.dumps(encode(value, repr))) for value in test.expected)


def holds(test: CallTest, reply: str, tolerance: float = 0.0) -> bool:
    """Compare a reply of code_inside.py with the test's expected value."""
    if len(reply) > reply_bytes(test):
        return False
    try:
        value = decode(json.loads(reply)["value"], _number)
        match test.compare:
            case "json":
                found = _as_json(value)
                return any(_same(found, _as_json(item), tolerance) for item in test.expected)
            case "equal":
                return any(_same(value, item, tolerance) for item in test.expected)
    except Exception:  # whatever a forged reply leads to is no value
        return False


def _number(kind: str, content: Any) -> Any:
    """Make a number or bytes of a class that can equal a constant, within bounds: a forged one
    would be a large amount of work."""
    if kind == "child":
        return decode(content[0], _number)
    match kind, decode(content, _number):
        case "builtins.bytearray", [bytes(data)]:
            return data
        case "fractions.Fraction", [int(one), int(other)] if max(abs(one), abs(other)) < 2**4096:
            return Fraction(one, other)
        case "decimal.Decimal", [str(text)] if len(text) < 1000:
            return Decimal(text)
    raise ValueError("an object is no value")


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Compare plain data as Python does, but NaN equals NaN; numbers, however deep, within the
    tolerance."""
    if isinstance(expected, float | int) and isinstance(found, float | int):
        both_nan = expected != expected and found != found
        return (
            both_nan or found == expected or (tolerance > 0 and _close(found, expected, tolerance))
        )
    if type(found) is type(expected) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(
            _same(a, b, tolerance) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same(found[k], expected[k], tolerance) for k in expected
        )
    return bool(found == expected)


def _as_json(value: Any) -> Any:
    """Convert to JSON's types: tuples become lists, and a dict's keys strings."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key): _as_json(item)
            for key, item in value.items()
        }
    return value
