"""The reward `code`: every form of tests, and every cheat of chaos/hostile/cheats.py against every
form."""

import json
import shutil
from dataclasses import dataclass, field

import pytest

from chaos.hostile.cheats import ASSERTS, CHEATS, TESTS, WITNESS, solution
from chaos.hostile.graded import GRADED
from tandem.plugins.graders.code import code_reward, holds, same_output
from tandem.plugins.graders.code_inside import decode, encode
from tandem.plugins.graders.code_tests import CallTest, calls, extract_code, read_tests
from tandem.plugins.graders.sandbox.local import Bubblewrap, Limits, Unisolated
from tandem.plugins.graders.sandbox.protocol import Result
from tandem.runtime.errors import UserError
from tandem.types import Problem
from tests.support.waiting import WAIT_S, given_time

ADD = "```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```"
LOOP = "METADATA = {}\n\ndef check(candidate):\n    for i in range(9):\n        assert candidate(i, 2) == i + 2"
PROGRAM = "```\nimport sys\na, b = map(int, input().split())\nprint(a + b)\nexit()\n```"


def problem(tests, **metadata):
    return Problem(uid="p/1", messages=(), answer="", metadata={"tests": tests, **metadata})


def parts(tests, completion, sandbox=None, options=None, **metadata):
    """A program that ends by itself has the time to, on the busiest machine. tests: or a whole
    problem."""
    given = {"timeout_s": WAIT_S, "test_timeout_s": WAIT_S, **(options or {})}
    task = tests if isinstance(tests, Problem) else problem(tests, **metadata)
    return code_reward(task, completion, sandbox=sandbox or SpyingBubblewrap(), **given)


def reward(*given, **options):
    return parts(*given, **options)["reward"]


def best_in_time(share, tests, completion, **options):
    """The best reward there is, where the option that is 0 has ever longer seconds until the reward
    is `share`."""
    [limit] = [name for name, seconds in options.items() if not seconds]

    def run(seconds):
        return reward(tests, completion, options=options | {limit: seconds})

    return max(given_time(run, lambda found: found == share, 0.5))


@dataclass
class Spy:
    """A sandbox that remembers what it was given and what came out."""

    results: list = field(default_factory=list)
    given: list = field(default_factory=list)


class SpyingBubblewrap(Bubblewrap):
    def __init__(self):
        if not shutil.which("bwrap"):
            pytest.skip("bubblewrap is not installed")
        super().__init__()
        self.spy = Spy()

    def run(self, command, **given):
        result = super().run(command, **given)
        self.spy.given.append(json.dumps([command, given["files"], given["stdin"]]))
        self.spy.results.append(result)
        return result

    def converse(self, asking, answering, **given):
        results = super().converse(asking, answering, **given)
        self.spy.given.append(json.dumps(answering))
        self.spy.results.append(results[1])
        return results


# ---------------------------------------------------------------- honest solutions


@pytest.mark.parametrize("form", TESTS)
def test_a_right_solution_passes_every_form(form):
    assert reward(TESTS[form], PROGRAM if form == "program" else ADD) == 1.0


def test_the_reward_is_the_share_of_tests_or_all_or_nothing():
    tests = ["assert add(1, 2) == 3", "assert add(1, -2) == -1", "assert add(1, 1) == 3"]
    rest = {"passed": 2 / 3, "tests": 3.0, "output_cut": 0.0}
    assert parts(tests, ADD) == {"reward": 2 / 3, **rest}
    assert parts(tests, ADD, options={"all_or_nothing": True}) == {"reward": 0.0, **rest}
    programs = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "5"}]
    assert reward(programs, PROGRAM) == 0.5


@pytest.mark.parametrize(
    "tests, metadata",
    [
        ({"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7], "fn_name": "add"}, {}),
        (json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}), {}),
        ([json.dumps({"function": "add", "kwargs": {"a": [1], "b": [2]}, "expected": [1, 2]})], {}),
        (
            "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)",
            {"entry_point": "add"},
        ),
        (LOOP, {"entry_point": "add"}),
        ("def test_add():\n    assert abs(add(0.1, 0.2) - 0.3) < 1e-9", {}),
        (
            "assert add((1,), (2,)) == (1, 2)\nassert set(add([1], [2])) == set([2, 1])\nassert add(0, 0) is not None",
            {},
        ),
        ("try:\n    add(1, 'x')\n    assert False, 'no error'\nexcept TypeError:\n    pass", {}),
    ],
)
def test_rows_of_other_projects_are_read_as_they_are(tests, metadata):
    assert reward(tests, ADD, **metadata) == 1.0


def test_a_script_reaches_objects_and_sees_its_arguments_changed():
    code = """```python
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
def top(stack): return stack.items[-1]
def sort(x): x.sort()
```"""
    script = """
stack = Stack()
stack.push({"a": (1, 2.5, float("inf"))})
assert len(stack) == 1 and top(stack) == {"a": (1, 2.5, float("inf"))} and stack.items == [top(stack)]
x = [3, 1, 2]
sort(x)
assert x == [1, 2, 3]
"""
    assert reward(script, code) == 1.0
    assert reward(script, code.replace("x.sort()", "sorted(x)")) == 0.0


@pytest.mark.parametrize(
    "script",
    [
        "from solution import *\ndef test_f(): assert f([1]) == 1",
        "import solution as s\nassert s.f([1]) + len(s.LIST) == 3",
        "a = [2, 1, 1]\nk = f(a)\nassert a[:k] == [1, 2]",  # seen from the next statement on
        "a = [2, 1, 1]\nassert math.floor(f(a)) == 2 and len(a) == 3\nassert a == [1, 2]",
    ],
)
def test_names_are_found_as_a_script_reads_them_and_changes_are_seen_later(script):
    code = "LIST = [1, 2]\ndef f(x):\n    x[:] = sorted(set(x))\n    return len(x)"
    assert reward(script, f"```python\n{code}\n```") == 1.0


def test_a_script_that_never_uses_the_solution_proves_nothing():
    assert reward("result = 1\nassert result == 1", ADD, entry_point="add") == 0.0


def test_tests_that_time_does_not_reach_have_failed():
    slow = "```python\nimport time\ntime.sleep(int(input()))\nprint('done')\n```"
    tests = [{"input": text, "output": "done"} for text in ("0", "600", "0")]
    assert best_in_time(2 / 3, tests, slow, test_timeout_s=0) == 2 / 3
    assert best_in_time(1 / 3, tests, slow, timeout_s=0) == 1 / 3


def test_a_hanging_call_costs_only_itself_while_there_is_time():
    loop = "```python\ndef f(x):\n    while x in (0, 3): pass\n    return x\n```"
    tests = [f"assert f({x}) == {x}" for x in range(10)]
    assert best_in_time(0.8, tests, loop, test_timeout_s=0, timeout_s=10 * WAIT_S) == 0.8
    assert reward(tests, loop, options={"test_timeout_s": 1.0, "timeout_s": 0.5}) == 0.0
    assert best_in_time(2 / 9, tests[1:], loop, test_timeout_s=10 * WAIT_S, timeout_s=0) == 2 / 9


def test_a_function_may_be_a_method_of_solution():
    methods = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    tests = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
    assert reward(tests, methods) == 1.0
    assert reward(tests, methods + "\n", entry_point="add") == 1.0
    assert reward("assert abs(add(0.1, 0.2) - 0.3) < 1e-9", methods) == 1.0
    function = methods.replace("a + b\n```", "0\n```")
    function = function.replace("class", "def add(a, b): return a + b\nclass")
    assert reward(tests, function) == 1.0
    assert reward({**tests, "fn_name": "plus"}, methods) == 0.0


# ---------------------------------------------------------------- cheats


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_gets_nothing(cheat):
    for form, tests in TESTS.items():
        if form == "unittest" and not cheat.naive and "unittest" not in cheat.code:
            continue  # the path of "script" again

        def run(seconds, tests=tests):
            sandbox = SpyingBubblewrap()
            options = {"test_timeout_s": seconds, "timeout_s": 2 * seconds}
            found = reward(tests, solution(cheat), sandbox, options)
            ran = any("WITNESS" in result.stderr for result in sandbox.spy.results)
            return found, ran or cheat.name == "is no program"

        results = given_time(run, lambda result: result[1], 0.4)
        assert {found for found, _ in results} == {0.0} and results[-1][1], form


@pytest.mark.parametrize(
    "cheat", [cheat for cheat in CHEATS if cheat.naive], ids=lambda cheat: cheat.name
)
def test_the_same_cheat_fools_asserts_in_the_same_process(cheat):
    text = f"{WITNESS}{cheat.code}\n{ASSERTS}\n"
    result = Unisolated().run(
        ["python", "main.py"], files={"main.py": text}, limits=Limits(wall_s=WAIT_S)
    )
    assert ("WITNESS" in result.stderr, result.exit_code) == (True, 0)


@pytest.mark.parametrize("form", TESTS)
def test_no_expected_value_enters_the_solutions_sandbox(form):
    sandbox = SpyingBubblewrap()
    assert reward(TESTS[form], PROGRAM if form == "program" else ADD, sandbox) == 1.0
    assert sandbox.spy.given and not [text for text in sandbox.spy.given if "199998" in text]


# what is a list arrives as one, without methods of its own; at most 2 honest ones
REFUSED = {"kodcode/a list's child"}


@pytest.mark.parametrize(
    "row", GRADED, ids=lambda row: f"{'honest' if row.honest else 'cheat'} {row.name}"
)
def test_an_honest_program_earns_the_reward_and_a_cheat_does_not(row):
    found = reward(row.problem, f"```python\n{row.program}\n```")
    assert (found == 1.0) is (row.honest and row.name not in REFUSED)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import numpy as np\nassert np.allclose(add(1, 2), 3)", "numpy"),
        ("import pytest\ndef test_add(): assert add(1, 2) == pytest.approx(3)", "pytest.approx"),
        ("import inspect\nassert inspect.isfunction(add)", "inspect"),
        ("from solution import add\nassert add(1, 2) == three", "reads three"),
        ("from solution import add\ndef test_add(tmp_path): assert add(1, 2) == 3", "tmp_path"),
        ("class TestAdd:\n    def test_it(self, case): assert add(*case) == 3", "fixture case"),
        ("assert same(add(1, 2), 3)", "reads same"),
        ("for i in [1]: assert add(i, 2) == THREE", "reads THREE"),
    ],
)
def test_a_script_that_no_solution_can_pass_is_the_rows_mistake(script, found):
    with pytest.raises(UserError, match="a test script cannot run") as caught:
        reward(script, ADD)
    assert found in caught.value.found and caught.value.where.startswith("problem p/1")


def test_one_object_for_everything_does_not_pass_a_list_test():
    cheat = "```python\ns = object()\nclass Pt:\n    __new__ = lambda c, x: s\npt = Pt\ndef mk(x): return [s]\n```"
    assert reward("assert pt(2) in mk(2)", cheat) == 0.0
    for script in ("assert mk(2) == [Pt(2)]", "assert Pt(2) in mk(2)"):
        with pytest.raises(UserError, match="comparison of the solution's objects"):
            reward(script, cheat)


# ---------------------------------------------------------------- two processes


@pytest.mark.parametrize(
    "script",
    [
        "a = [3, 1]\nr = f(a)\nassert r == sorted(a)",
        "a = [3, 1]\nr = list(f(x=a))\nq = r\nwant = sorted(a)\nassert len(q) == len(want)",
        "for a in [[3, 1], [2]]:\n    if (r := f(a)) is not None: assert sorted(a) == r",
    ],
)
def test_a_result_under_a_name_is_compared_with_its_argument_before_the_call(script):
    cheat = "```python\ndef f(x):\n    x.clear()\n    return []\n```"
    assert reward(script, cheat) == 0.0
    honest = cheat.replace("x.clear()\n    return []", "return sorted(x)")
    assert reward(script, honest) == 1.0


SUITE = "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "


def test_equal_data_across_the_line_is_no_identity():
    for script in ("a = [1]\nassert f(a) is a", SUITE + "a = {}\n        self.assertIs(f(a), a)"):
        with pytest.raises(UserError, match="a test script cannot run") as caught:
            reward(script, "```python\ndef f(a): return a\n```")
        assert "one object" in caught.value.found


SWALLOWS = (
    "class A:\n    __enter__ = lambda s: s\n    __exit__ = lambda *a: True\n    def get(self): "
)
WITH = "from solution import A\n"
ADDS = "def test_add():\n    assert add(1, 2) == 3"
HIDDEN = [  # (the script, a solution that hides the test's own error)
    (WITH + "with A() as a:\n    assert a.get() == 5", SWALLOWS + "return 0"),
    (WITH + "with A() as a:\n    assert a.get() == 5", SWALLOWS + "raise ValueError"),
    (WITH + "with A() as a:\n    assert a.get() + 1 == 6", SWALLOWS + "return None"),
    (WITH + "with A() as a:\n    assert a.get() == 5", SWALLOWS + "raise SystemExit"),
    (
        WITH + "with A() as a:\n    x = a.get()\n    if x != 5: raise ValueError",
        SWALLOWS + "return 0",
    ),
    (
        WITH + "def same(x): assert x == 5\nwith A() as a: same(a.get())",
        SWALLOWS + "raise ValueError",
    ),
    (WITH + SUITE + "with A() as a: self.assertEqual(a.get(), 5)", SWALLOWS + "raise ValueError"),
    (
        WITH
        + "from contextlib import ExitStack\nwith ExitStack() as s:\n    a = s.enter_context(A())\n    assert a.get() == 5",
        SWALLOWS + "raise ValueError",
    ),
    (
        "import pytest\nfrom solution import E, f\nwith pytest.raises(E): assert f(1) == 5",
        "E = Exception\ndef f(x): return 0",
    ),
    (
        "from solution import E, f\ntry: assert f(1) == 5\nexcept E: pass",
        "E = AssertionError\ndef f(x): return 0",
    ),
    (
        "from solution import M, f\ntry: assert f(1) == 5\nexcept M.E: pass",
        "class M: E = Exception\ndef f(x): return 0",
    ),
    ("import pytest\nwith pytest.raises(Exception): f(1)", "import os\ndef f(x): os._exit(0)"),
    # no error of a good row either
    (SUITE + "self.assertEqual(IsPrime(3), True)", "class R: pass\ndef IsPrime(x): return R()"),
    ("x = IsPrime(3)\nassert x == True", "class IsPrime:\n    def __init__(self, x): pass"),
    ("assert IsPrime(3) == IsPrime(5)", "class R: pass\ndef IsPrime(x): return R()"),
    (
        WITH + "with A() as a:\n    x = a.get()\nassert x == 5",
        SWALLOWS + "import json; json.loads('')",
    ),
    (WITH + "with A() as a:\n    x = a.get()\nassert x == 5", SWALLOWS + "raise SystemExit"),
    (ADDS, "import nowhere\ndef add(a, b): return 3"),
    (ADDS, "def add(a, b): return undefined"),
    (ADDS, "def other(): pass"),
    ("for x in add(1, 2):\n    last = x\nassert last == 3", "def add(a, b): return []"),
    (
        "def test_add():\n    for x in add(1, 2): pass\n    assert x == 3",
        "def add(a, b): return []",
    ),
    # a skip of the solution skips no test
    (SUITE + "self.assertEqual(f(), 2)", "import unittest\ndef f(): raise unittest.SkipTest('')"),
    (
        SUITE + "self.assertEqual(f(), 2)",
        "import unittest\ndef f(): raise type('S', (unittest.SkipTest,), {})('')",
    ),
]


@pytest.mark.parametrize(("script", "program"), HIDDEN, ids=range(len(HIDDEN)))
def test_a_solution_hides_no_failure_of_the_test(script, program):
    assert reward(script, f"```python\n{program}\n```") == 0.0


def test_python_reads_and_prints_integers_of_any_length():
    long = "1" * 5000
    program = f"```python\ndef f(x=0): return int('{long}')\nprint(f())\n```"
    assert reward([{"input": "", "output": long}], program) == 1.0
    for tests in ([f"assert f({long}) == {long}"], f"for i in [1]: assert f({long}) == {long}"):
        assert reward(tests, program) == 1.0


def test_output_may_be_as_long_as_a_right_one_and_more_is_told():
    program = "```python\nprint('a' * 3_000_000)\n```"
    assert reward([{"input": "", "output": "a" * 3_000_000}], program) == 1.0
    found = parts([{"input": "", "output": "b"}], program)
    assert (found["reward"], found["output_cut"]) == (0.0, 1.0)


# ---------------------------------------------------------------- parts


def test_the_program_is_the_last_python_block_or_the_text():
    assert extract_code("print(1)") == "print(1)"
    rest = "\nx = 1\n```\nb\n```\nx = 2\n```\nout:\n```text\n2\n```"
    assert extract_code(f"a\n```python{rest}") == "x = 1\n"
    assert extract_code(f"a\n```{rest}") == "x = 2\n"
    assert extract_code("<think>\n```python\nx = 1\n```\n</think>\n```\nx = 2\n```") == "x = 2\n"
    assert extract_code("```py\nx = 1\n```\n```python\nx = 3") == "x = 3\n"


@pytest.mark.parametrize(
    "script",
    [
        # the call would hold the answer
        "assert isclose(f(1), 5) == True\nfrom math import isclose",
        "assert (f(1) == 5) == True",
        "assert f(lambda: 5) == 5",
        "assert f(x) == 5\nx = 5",
        "assert f(1) == g(1)",
        "assert sorted(f(1)) == [1]",
        "assert not f(1)",
        "assert abs(f(1) - 5) < 0.1",
        "assert isinstance(f(1), int)",
        "assert f(1) == 5 or f(1) == 6",
        "x = f(1)\nassert x == 5",
        "def check(g): assert g(1) == 5",
    ],
)
def test_any_other_script_is_left_whole(script):
    assert calls(script) == []


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -5, 2**200, 1.5),
        "a\n\"'é\ud800",
        b"\0\xff",
        [1, (2, {3})],
        {"a": {(1, 2): frozenset("x")}},
        1 + 2j,
    ],
)
def test_values_survive_the_way_out(value):
    found = decode(json.loads(json.dumps(encode(value, repr))), None)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.usefixtures("no_collection")
def test_replies_that_are_no_values_hold_nothing():
    test = CallTest(expression="f()", expected=(3,))
    assert holds(test, '{"value": 3}')
    hostile = [
        "",
        "3",
        "null",
        "[]",
        "[" * 10**5,
        '{"error": ["E", "3"]}',
        '{"value": {"object": 0}}',
        '{"value": {"fractions.Fraction": ["1e999999999"]}}',
        '{"value": {"fractions.Fraction": ["1e999999999", 1]}}',
        '{"value": {"builtins.bytearray": [100000000000]}}',
        '{"value": {"builtins.range": [0, 1000000000000]}}',
        '{"value": {"decimal.Decimal": ["1e999999999999999999"]}}',
        '{"value": {"collections.deque": [[1], "x"]}}',
        '{"value": {"float": "3"}}',
        f'{{"value": {{"set": {[(2**61 - 1) * n for n in range(1, 50_000)]}}}}}',
        '{"value": 1' + "0" * 10**6 + "}",
    ]
    hostile += [
        f'{{"value": {text}}}'
        for text in ('{"dict": 3}', '{"int": null}', '{"set": [[]]}', '{"a": 1, "b": 2}')
    ]
    assert not [reply for reply in hostile if holds(test, reply)]


def test_output_is_compared_by_lines_or_by_words_in_tolerance():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")
    assert same_output("0.3333 x\n", "0.33333 x", 1e-3)
    assert not same_output("0.3333 x", "0.33333 y", 1e-3)


def test_printed_floats_are_equal_within_a_millionth_and_nothing_else_is():
    assert same_output("x=0.30000000000000004, [1e-07]", "x=0.3, [1.0e-7]")
    assert same_output("1234567.8915\n-0.0", "1234567.8910\n0.00")
    for found, expected in [
        ("0.3334", "0.3333"),
        ("1000001", "1000000"),
        ("3.0", "3"),
        ("1.2.3", "1.2.30"),
        ("3.141592653589793", "3.14159265358979323846264338"),
        ("1  2", "1 2"),
        ("0.5 1", "0.5\n1"),
    ]:
        assert not same_output(found, expected), found
    assert not same_output("0.30000000000000004", "0.3", 0.0)
    assert same_output("1001 3", "1000 3.0", 1e-2)


@pytest.mark.parametrize(
    "tests",
    [
        [],
        "",
        3,
        [{"input": "1"}],
        {"inputs": [1], "outputs": []},
        "assert (",
        [{"args": [], "expected": 1}],
    ],
)
def test_a_problem_without_tests_names_the_forms_there_are(tests):
    with pytest.raises(UserError, match="no tests that can be read") as caught:
        read_tests(problem(tests))
    assert "p/1" in caught.value.where and "expected" in caught.value.expected


def test_a_program_that_printed_right_and_failed_has_not_passed():
    class Failing:
        def run(self, command, **given):
            return Result(stdout="3\n", stderr="", exit_code=1, stop_reason="exit", seconds=0.0)

    assert reward([{"input": "", "output": "3"}], "print(3)", Failing()) == 0.0
