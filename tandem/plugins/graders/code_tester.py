"""A program inside a sandbox of its own, beside a data set's tests.

    python code_tester.py    runs the scripts of tests.json; a stand-in for each name of the
                             solution sends calls to stdout and reads results from stdin; the
                             verdicts go to stderr

    tester [sandbox 1] -- stdout: 'f([1, 2])' --> [sandbox 2] solution, code_inside.py
                       <-- stdin: {"value": 3} --

An object that equals everything arrives as a stand-in that equals nothing. Of pytest there are
raises, approx, fail and mark.parametrize; other marks do nothing.
"""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from code_inside import COPY, INVOKE, OBJECTS, PYTHON, SAME, STANDARD, decode, private_streams, read


class SolutionError(BaseException):
    """An end of the solution's process, or an invalid value from it; no Exception, as a test may
    expect one."""


# A loop of the test would end at one of these, and not notice the failure.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)


class Remote:
    """A stand-in for an object of the solution. It can be called, indexed, measured, read and set,
    and not compared: equality would be the solution's claim.

    level: 2 for a class that the test names, 1 for its instances and members, else 0. A comparison
    of 1 or 2 with another object of the solution is the test's mistake.
    """

    def __init__(self, line: "Line", source: str):
        vars(self).update(_line=line, _source=source, _level=0)

    def _below(self, value: Any) -> Any:
        if isinstance(value, Remote):
            vars(value)["_level"] = max(0, self._level - 1)
        return value

    def _operate(self, *others: Any) -> Any:
        objects = [other for other in (self, *others) if isinstance(other, Remote)]
        if len(objects) > len(others) and any(one._level for one in objects):
            self._line.unsupported = "uses an operator or a comparison of the solution's objects"
        raise SolutionError("an object of the solution cannot be compared with a value")

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._operate(other)

    def __hash__(self) -> int:
        return self._operate() if self._level == 1 else id(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._below(self._call(args, kwargs, keep=True))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool) -> Any:
        """Call the object. keep: change the test's lists, dicts and sets as the solution did."""
        sources = f"{self._source}, {self._line.source([*args])}, {self._line.source(kwargs)}"
        reply = self._line.ask(f"{INVOKE}({sources})")
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            raise SolutionError("a call came back as something else")
        for mine, theirs in zip(args, reply[1] if keep else ()):  # noqa: B905 - a lying solution may send fewer
            if type(mine) is type(theirs) is list:
                mine[:] = theirs
            elif type(mine) is type(theirs) and isinstance(mine, dict | set):
                mine.clear()
                mine.update(theirs)
        return reply[0]

    def __getattr__(self, name: str) -> Any:
        return self._below(self._line.ask(f"{self._source}.{name}"))

    def __next__(self) -> Any:
        for item in self._line.ask(f"[*__import__('itertools').islice({self._source}, 1)]"):
            return item
        raise StopIteration

    def __contains__(self, item: Any) -> bool:
        # a function's result could claim to hold everything, so its items are compared here
        asked = f"{self._line.source(item)} in {self._source}"
        return bool(self._line.ask(asked)) if self._level else item in [*self]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Leave the context, and swallow no error: it may be a failed check."""
        if not isinstance(error, AssertionError | SolutionError):  # these are the test's own
            self.__getattr__("__exit__")(kind, error, None)


def _forwarded(function: str) -> Any:
    return lambda self, *args: self._line.ask(
        f"{function}({', '.join(map(self._line.source, (self, *args)))})"
    )


for _name in re.findall(
    r"\w+", "repr str len bool iter setattr delattr int float abs round reversed"
):
    setattr(Remote, f"__{_name}__", _forwarded(f"{PYTHON}['{_name}']"))
for _name in ("getitem", "setitem", "delitem", "neg", "index"):
    setattr(Remote, f"__{_name}__", _forwarded(f"__import__('operator').{_name}"))
for _name in ("instance", "subclass"):
    _is = _forwarded(f"(lambda kind, value: {PYTHON}['is{_name}'](value, kind))")
    setattr(Remote, f"__{_name}check__", _is)
setattr(Remote, "__enter__", _forwarded("(lambda context: context.__enter__())"))  # noqa: B010
for _name in re.findall(
    r"\w+", "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
):
    setattr(Remote, f"__{_name}__", Remote._operate)
    setattr(Remote, f"__r{_name}__", Remote._operate)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", Remote._operate)
setattr(Remote, "__reduce_ex__", lambda self, _: self._operate())  # noqa: B010 - copy and pickle


def on_a_copy(function: Any) -> Any:
    """Make a function leave its arguments unchanged, if it is the solution's (across_the_line)."""
    if not isinstance(function, Remote):
        return function
    return lambda *args, **kwargs: function._below(function._call(args, kwargs, keep=False))


class Line:
    """The line to the solution: expressions go out, plain data and stand-ins come back.

    unsupported: what the script did that cannot work, whatever the solution.
    """

    def __init__(self, replies: Any, requests: Any):
        self.replies, self.requests = replies, requests
        self.asked = 0
        self.unsupported = ""
        self.kinds: dict[str, Any] = {}  # stand-ins for the solution's classes of exceptions

    def ask(self, expression: str) -> Any:
        self.asked += 1
        try:
            self.requests.write(repr(expression) + "\n")
            self.requests.flush()
            reply = json.loads(self.replies.readline(2**24))
            if "error" not in reply:
                return decode(reply["value"], self._make)
            kind, *more = reply["error"]
            error = _raised(self._kind(kind["exception"]), *decode(more, self._make))
        except Exception as problem:
            raise SolutionError(f"no value came back: {problem}") from None
        raise error

    def _make(self, kind: str, content: Any) -> Any:
        if kind == "object":
            # a new one each time: lists take one object for equal to itself
            return Remote(self, f"{OBJECTS}[{int(content)}]")
        if kind == "exception":
            if issubclass(AssertionError, found := self._kind(content)):
                raise ValueError("an `except` of it would hold the test's own errors")
            return found
        if kind == "child":
            data, other = decode(content[0], self._make), self._make("object", content[1])
            members = {"__getattr__": lambda _, name: getattr(other, name), "_remote": other}
            return type("Child", (type(data),), members)(data)
        module, _, name = kind.rpartition(".")
        if kind not in STANDARD:
            raise ValueError(f"no value is of kind {kind!r}")
        return getattr(__import__(module), name)(*decode(content, self._make))

    def _kind(self, lineage: list[Any]) -> Any:
        """Return the class of exceptions with this lineage: Python's own, else a stand-in."""
        path, *bases = lineage
        module, _, name = path.rpartition(".")
        known = vars(sys.modules[module]).get(name) if module in sys.modules else None
        library = module.partition(".")[0] in sys.stdlib_module_names - {
            "unittest"
        }  # a skip passes
        if library and isinstance(known, type) and issubclass(known, BaseException):
            return known
        if path not in self.kinds:
            members = {"__str__": lambda e: vars(e).get("_text") or Exception.__str__(e)}
            self.kinds[path] = type(name, tuple(map(self._kind, bases)), members)
        return self.kinds[path]

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether one object is another; of equal data nobody can: copies cross the line."""
        if isinstance(one, Remote) and isinstance(other, Remote):
            return bool(one._source == other._source)
        if one is not other and type(one) is type(other) and one == other:
            self.unsupported = "asks whether one object is another"
        return one is other

    def source(self, value: Any) -> str:
        """Write an expression for this value in the solution; raises TypeError if there is none."""
        value = vars(type(value)).get("_remote", value)
        kind = type(value)
        if isinstance(value, Remote):
            return str(value._source)
        if value is None or kind in (bool, int, str, bytes):
            return repr(value)
        if kind in (float, complex):
            return f"{kind.__name__}({str(value)!r})"
        if kind in (list, tuple, set, frozenset):
            return f"{PYTHON}['{kind.__name__}']([{', '.join(map(self.source, value))}])"
        if kind is dict:
            pairs = [f"({self.source(key)}, {self.source(item)})" for key, item in value.items()]
            return f"{PYTHON}['dict']([{', '.join(pairs)}])"
        path = f"{kind.__module__}.{kind.__qualname__}"
        if path in STANDARD:
            arguments = ", ".join(map(self.source, STANDARD[path](value)))
            return f"__import__({kind.__module__!r}).{kind.__qualname__}({arguments})"
        if isinstance(value, Exception):
            return f"{self.source(kind)}(*{self.source([*value.args])})"
        if value in self.kinds.values():
            return str(value.__name__)
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        library = str(module).partition(".")[0] in sys.stdlib_module_names
        if library and vars(sys.modules[str(module)]).get(name) is value:
            return f"__import__({module!r}, None, None, ['']).{name}"
        self.unsupported = f"hands the solution a {kind.__name__} of its own"
        raise TypeError(self.unsupported)


def _raised(kind: Any, text: str, args: list[Any], more: dict[str, Any]) -> Exception:
    """Return the error that the solution raised, or another one if that could end a loop."""
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ENDS):
        kind, args = SolutionError, [text]
    try:
        error = kind(*args)
    except Exception:  # json.JSONDecodeError does not keep what it was made of
        error = kind.__new__(kind, *args)
    vars(error).update(more, _text=text)
    return error


# ---------------------------------------------------------------- pytest


@contextlib.contextmanager
def raises(kinds: Any, *, match: str | None = None) -> Iterator[Any]:
    """Fail without such an exception; its `value` is the exception."""
    found = SimpleNamespace()
    try:
        yield found
    except kinds as error:
        found.value, found.type = error, type(error)
        if not re.search(match or "", str(error)):
            raise
    else:
        raise AssertionError(f"did not raise {kinds}")


class Approx:
    """A number equal to others within 1e-6 of it, relatively, or 1e-12; a list, tuple or dict of
    such."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None):
        self.expected, self.abs = expected, 1e-12 if abs is None else abs
        self.rel = (1e-6 if abs is None else 0) if rel is None else rel

    def __eq__(self, found: object) -> bool:
        expected = self.expected
        if isinstance(expected, int | float) and isinstance(found, int | float):
            return math.isclose(found, expected, rel_tol=self.rel, abs_tol=self.abs)
        if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
            return [Approx(item, self.rel, self.abs) for item in expected] == [*found]
        if isinstance(expected, dict) and isinstance(found, dict):
            return {k: Approx(v, self.rel, self.abs) for k, v in expected.items()} == found
        return bool(found == expected)


class Marks:
    def parametrize(self, names: Any, values: Any, **_: Any) -> Any:
        """Return a decorator for a test that runs once with each row of values; `cases` holds the
        rows."""
        columns = re.findall(r"\w+", names) if isinstance(names, str) else names
        rows = [
            dict(zip(columns, row if len(columns) > 1 else [row], strict=True)) for row in values
        ]

        def marked(test: Any) -> Any:
            before = vars(test).get("cases", [{}])
            test.cases = [{**row, **other} for other in before for row in rows]
            return test

        return marked

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if args and callable(args[0]) else lambda test: test


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


# ---------------------------------------------------------------- scripts


def test() -> None:
    """Run every script of tests.json in a namespace of its own; the verdicts go to stderr.

    tests.json: {"scripts": [...], "before": [...], "names": [...], "entry_point": ""}. before:
    statements that make names for the scripts; names: those that the solution makes.
    """
    sys.set_int_max_str_digits(0)
    replies, requests = private_streams()
    verdicts = os.dup(2)
    os.dup2(1, 2)
    sys.modules["pytest"] = pytest = ModuleType("pytest")
    vars(pytest).update(raises=raises, approx=Approx, fail=fail, mark=Marks(), main=lambda *_: 0)
    line = Line(replies, requests)
    tests = json.loads(read("tests.json"))
    reports = [
        {"passed": _passed(line, text, tests), "unsupported": line.unsupported}
        for text in tests["scripts"]
    ]
    os.write(verdicts, json.dumps(reports).encode())


def _passed(line: Line, script: str, tests: dict[str, Any]) -> bool:
    line.unsupported = ""
    try:
        provided = {name: line.ask(name) for name in tests["names"]}
        for name, value in provided.items():
            asked = f"{PYTHON}['isinstance']({name}, {PYTHON}['type'])"
            if isinstance(value, Remote) and name[0].isupper() and line.ask(asked) is True:
                vars(value)["_level"] = 2
        before = line.asked
        _run_script(script, {**provided, SAME: line.same}, tests)
    except BaseException:  # a script that did not come to its end, by an exit too, did not pass
        return False
    # one that never used the solution proves nothing
    return line.asked > before or not all(isinstance(v, Remote) for v in provided.values())


def _run_script(script: str, provided: dict[str, Any], tests: dict[str, Any]) -> None:
    """Run a test script, then its HumanEval `check`, cases of unittest, tests of pytest."""
    # unittest.main looks for its cases in the first
    module, solution = ModuleType("__main__"), ModuleType("solution")
    sys.modules["__main__"], sys.modules["solution"] = module, solution
    for statement in tests["before"]:
        with contextlib.suppress(ImportError):  # it may be the solution's only
            exec(statement, vars(module))
    vars(module).update(provided, __file__="test.py", **{COPY: on_a_copy})
    vars(solution).update(provided)
    there = set(vars(module))
    ends = re.search(r"\b(unittest|pytest)\.main\b", script)
    with contextlib.suppress(SystemExit) if ends else contextlib.nullcontext():
        exec(compile(script, "test", "exec"), vars(module))
    own = {name: value for name, value in vars(module).items() if name not in there}
    if tests["entry_point"] and "check" in own:
        own["check"](provided[tests["entry_point"]])
        return
    if "unittest" in sys.modules:
        import unittest

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
        for _, trace in [*result.errors, *result.failures]:
            raise AssertionError(trace.strip().rpartition("\n")[2])
    for name, value in own.items():
        # pytest's functions; a helper `test(x, y)` is called by the script
        alone = isinstance(value, FunctionType) and not value.__code__.co_argcount
        if name.startswith("test") and (alone or (name[4:5] == "_" and callable(value))):
            _run_test(value)
        elif name.startswith("Test") and isinstance(value, type) and not hasattr(value, "run"):
            for method in [name for name in dir(value) if name.startswith("test")]:
                case = value()  # unittest's classes have `run`
                if setup := getattr(case, "setup_method", None):
                    # pytest gives the method, if wanted
                    setup(*[None] * (setup.__code__.co_argcount - 1))
                _run_test(getattr(case, method))


def _run_test(test: Any) -> None:
    """Call a test function, once for each row of its `pytest.mark.parametrize`."""
    for arguments in getattr(test, "cases", [{}]):
        test(**arguments)


if __name__ == "__main__":
    test()
