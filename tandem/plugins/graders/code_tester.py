"""A program inside a sandbox of its own, beside a data set's tests.

    python code_tester.py    runs the scripts of tests.json; a name that they do not make is the
                             solution's: a stand-in sends calls to stdout and reads results from
                             stdin; the verdicts go to stderr

    tester [sandbox 1] -- stdout: ["call", [f, [1, 2], {}]] --> [sandbox 2] solution, code_inside.py
                       <-- stdin: {"value": [3, [1, 2]]} --

An object that equals everything arrives as a stand-in that equals nothing. Of pytest there is
`raises`, and the names by which it finds tests.
"""

import builtins
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from code_inside import FLUSH, SAME, decode, encode, private_streams, read, standard


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

    def __init__(self, line: "Line", number: int):
        vars(self).update(_line=line, _number=number, _level=0)

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
        reply = self._line.ask("call", self, [*args], kwargs)
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            raise SolutionError("a call came back as something else")
        self._line.changes += [] if isinstance(reply[0], RESULTS) else [(args, reply[1])]
        if reply[0] is None:
            self._line.flush()
        return self._below(reply[0])

    def __getattr__(self, name: str) -> Any:
        return self._below(self._line.ask("getattr", self, name))

    def __next__(self) -> Any:
        for item in self._line.ask("first", self):
            return item
        raise StopIteration

    def __contains__(self, item: Any) -> bool:
        # a function's result could claim to hold everything, so its items are compared here
        return bool(self._line.ask("contains", self, item)) if self._level else item in [*self]

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._line.ask("isinstance", value, self))

    def __subclasscheck__(self, kind: Any) -> bool:
        return bool(self._line.ask("issubclass", kind, self))

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Leave the context, and swallow no error: it may be a failed check."""
        if not isinstance(error, AssertionError | SolutionError):  # these are the test's own
            self.__getattr__("__exit__")(None, None, None)


# What a call returns that may claim to hold an argument: its changes of arguments are not seen.
RESULTS = (list, tuple, dict, set, Remote)


def _forwarded(operation: str) -> Any:
    return lambda self, *args: self._line.ask(operation, self, *args)


for _name in (
    *("repr", "str", "len", "bool", "iter", "setattr", "delattr", "int", "float", "abs", "round"),
    *("reversed", "getitem", "setitem", "delitem", "neg", "index"),
):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift"),
):
    setattr(Remote, f"__{_name}__", Remote._operate)
    setattr(Remote, f"__r{_name}__", Remote._operate)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", Remote._operate)
setattr(Remote, "__reduce_ex__", lambda self, _: self._operate())  # noqa: B010 - copy and pickle


class Line:
    """The line to the solution: operations go out, plain data and stand-ins come back.

    unsupported: what the script did that cannot work, whatever the solution. used: whether it asked
    for more than names. changes: of arguments, which the script sees from its next statement on.
    """

    def __init__(self, replies: Any, requests: Any):
        self.replies, self.requests = replies, requests
        self.used, self.unsupported = False, ""
        self.changes = list[tuple[Any, Any]]()
        self.kinds: dict[str, Any] = {}  # stand-ins for the solution's classes of exceptions

    def ask(self, operation: str, *arguments: Any) -> Any:
        self.used = True
        try:
            self.requests.write(json.dumps([operation, encode([*arguments], self._other)]) + "\n")
            self.requests.flush()
            reply = json.loads(self.replies.readline(2**24))
            if "error" not in reply:
                return decode(reply["value"], self._make)
            kind, *more = reply["error"]
            error = _raised(self._kind(kind["exception"]), *decode(more, self._make))
        except Exception as problem:
            raise SolutionError(f"no value came back: {problem}") from None
        raise error

    def look_up(self, name: str) -> Any:
        """Return what a name of the solution means; plain data is used by that."""
        before, value = self.used, self.ask("eval", name)
        if isinstance(value, Remote):
            if name[0].isupper() and self.ask("isinstance", value, type) is True:
                vars(value)["_level"] = 2
            self.used = before
        return value

    def flush(self) -> None:
        """Change the test's lists, dicts and sets as the solution did."""
        for args, after in self.changes:
            for mine, theirs in zip(args, after):  # noqa: B905 - a lying solution may send fewer
                if type(mine) is type(theirs) is list:
                    mine[:] = theirs
                elif type(mine) is type(theirs) and isinstance(mine, dict | set):
                    mine.clear()
                    mine.update(theirs)
        self.changes.clear()

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether one object is another; of equal data nobody can: copies cross the line."""
        if isinstance(one, Remote) and isinstance(other, Remote):
            return bool(one._number == other._number)
        if one is not other and type(one) is type(other) and one == other:
            self.unsupported = "asks whether one object is another"
        return one is other

    def _other(self, value: Any) -> Any:
        """Return the JSON of what is no plain data: objects of the solution, and of Python's
        library."""
        value = vars(type(value)).get("_remote", value)
        if isinstance(value, Remote):
            return {"object": value._number}
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        is_library = str(module).partition(".")[0] in sys.stdlib_module_names
        if is_library and vars(sys.modules[str(module)]).get(name) is value:
            return {"library": f"{module}.{name}"}
        self.unsupported = f"hands the solution a {type(value).__name__} of its own"
        raise TypeError(self.unsupported)

    def _make(self, kind: str, content: Any) -> Any:
        match kind:
            case "object":
                # a new one each time: lists take one object for equal to itself
                return Remote(self, int(content))
            case "exception":
                if issubclass(AssertionError, found := self._kind(content)):
                    raise ValueError("an `except` of it would hold the test's own errors")
                return found
            case "child":
                data, other = (decode(part, self._make) for part in content)
                members = {"__getattr__": lambda _, name: getattr(other, name), "_remote": other}
                return type("Child", (type(data),), members)(data)
        return standard(kind, content, self._make)

    def _kind(self, lineage: list[Any]) -> Any:
        """Return the class of exceptions with this lineage: Python's own, else a stand-in."""
        path, *bases = lineage
        module, _, name = path.rpartition(".")
        known = vars(sys.modules[module]).get(name) if module in sys.modules else None
        # a skip passes
        is_library = module.partition(".")[0] in sys.stdlib_module_names - {"unittest"}
        if is_library and isinstance(known, type) and issubclass(known, BaseException):
            return known
        if path not in self.kinds:
            members = {"__str__": lambda e: vars(e).get("_text") or Exception.__str__(e)}
            self.kinds[path] = type(name, tuple(map(self._kind, bases)), members)
        return self.kinds[path]


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


@contextlib.contextmanager
def raises(kinds: Any, *, match: str = "") -> Iterator[Any]:
    """Fail without such an exception, as pytest does; its `value` is the exception."""
    found = SimpleNamespace()
    try:
        yield found
    except kinds as error:
        found.value, found.type = error, type(error)
        if not re.search(match, str(error)):
            raise
    else:
        raise AssertionError(f"did not raise {kinds}")


# ---------------------------------------------------------------- scripts


def test() -> None:
    """Run every script of tests.json in a namespace of its own; the verdicts go to stderr.

    tests.json: {"scripts": [...], "before": [...], "entry_point": ""}. before: statements that make
    names for the scripts. A script is {"text": "", "made": [...], "judges": [...], "imports":
    false}. made: names that it makes; judges: those that the solution must not make; imports:
    whether it imports the solution's.
    """
    sys.set_int_max_str_digits(0)
    replies, requests = private_streams()
    verdicts = os.dup(2)
    os.dup2(1, 2)
    sys.modules["pytest"] = pytest = ModuleType("pytest")
    vars(pytest).update(raises=raises, main=lambda *_: 0)
    line = Line(replies, requests)
    tests = json.loads(read("tests.json"))
    reports = [_report(line, script, tests) for script in tests["scripts"]]
    os.write(verdicts, json.dumps(reports).encode())


def _report(line: Line, script: dict[str, Any], tests: dict[str, Any]) -> dict[str, Any]:
    """Tell whether a script passed; if not, what of it is `unsupported`."""
    line.used, line.unsupported = False, ""
    line.changes.clear()
    try:
        _run_script(line, script, tests)
        # one that never used the solution proves nothing
        return {"passed": line.used, "unsupported": ""}
    except BaseException as error:  # a script that did not come to its end, by an exit too
        if isinstance(error, ModuleNotFoundError) and not hasattr(error, "_text"):
            line.unsupported = f"imports {error.name}"
        return {"passed": False, "unsupported": line.unsupported}


class Names(dict[str, Any]):
    """The builtins of a script. Another name that it does not make is the solution's, or nobody's.

    With an entry point, or imports from the module `solution`, no other name is the solution's; nor
    is ever a constant, or a judge of the solution's result.
    """

    def __init__(self, line: Line, script: dict[str, Any], entry_point: str):
        super().__init__(vars(builtins))
        self.line, self.script, self.entry_point = line, script, entry_point

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or name in self.script["made"]:
            raise KeyError(name)  # not made yet, as by a loop over nothing
        called = re.search(rf"\b{name}\(", self.script["text"])
        if name in sys.stdlib_module_names and not called:
            return __import__(name)
        if self.script["imports"] or self.entry_point:
            root = self.entry_point.partition("(")[0].partition(".")[0]
            known = name == root and not self.script["imports"]
        else:
            known = name not in self.script["judges"] and bool(called or not name.isupper())
        if known:
            return self.line.look_up(name)
        self.line.unsupported = f"reads {name}, which nothing makes"
        raise KeyError(name)


def _run_script(line: Line, script: dict[str, Any], tests: dict[str, Any]) -> None:
    """Run a test script, then its HumanEval `check`, cases of unittest, tests of pytest."""
    # unittest.main looks for its cases in the first
    module, solution = ModuleType("__main__"), ModuleType("solution")
    sys.modules["__main__"], sys.modules["solution"] = module, solution

    def member(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return line.look_up(name)

    vars(solution).update(__getattr__=member, __all__=[])
    builtin = Names(line, script, tests["entry_point"])
    vars(module).update(__builtins__=builtin, __file__="test.py")
    for statement in tests["before"]:
        with contextlib.suppress(ImportError):  # it may be the solution's only
            exec(statement, vars(module))
    there = {*vars(module)}
    vars(module).update({SAME: line.same, FLUSH: line.flush})
    ends = re.search(r"\b(unittest|pytest)\.main\b", script["text"])
    with contextlib.suppress(SystemExit) if ends else contextlib.nullcontext():
        exec(compile(script["text"], "test", "exec"), vars(module))
    own = {name: value for name, value in vars(module).items() if name not in there}
    if tests["entry_point"] and "check" in own:
        own["check"](line.look_up(tests["entry_point"]))
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
            _run_test(line, value)
        elif name.startswith("Test") and isinstance(value, type) and not hasattr(value, "run"):
            for method in [name for name in dir(value) if name.startswith("test")]:
                case = value()  # unittest's classes have `run`
                if setup := getattr(case, "setup_method", None):
                    # pytest gives the method, if wanted
                    setup(*[None] * (setup.__code__.co_argcount - 1))
                _run_test(line, getattr(case, method))


def _run_test(line: Line, test: Any) -> None:
    if isinstance(function := getattr(test, "__func__", test), FunctionType):
        code, defaults = function.__code__, len(function.__defaults__ or ())
        if wanted := code.co_varnames[function is not test : code.co_argcount - defaults]:
            line.unsupported = f"uses the fixture {wanted[0]}"
    test()


if __name__ == "__main__":
    test()
