"""A program inside the sandbox, beside a model's code or a data set's tests.

    python code_inside.py solve    loads solution.py, then answers each line of stdin, an expression
                                   in quotes, with JSON: {"value": ...} or {"error": [name, text]}
    python code_inside.py test     runs the scripts of tests.json; a stand-in for each name of the
                                   solution sends calls to stdout and reads results from stdin; the
                                   verdicts go to stderr

    tester [sandbox 1] -- stdout: 'f([1, 2])' --> [sandbox 2] solution
                       <-- stdin: {"value": 3} --

Only plain data comes back, so the solution can reach no expected value, verdict, frame, checker or
exit code, and an object that equals everything arrives as a stand-in that equals nothing. The
solution controls all of `solve`; its lines are trusted to be values, and no more.
"""

import builtins
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

INVOKE, OBJECTS, COPY = "__invoke__", "__objects__", "__on_a_copy__"


# ---------------------------------------------------------------- values as JSON
# By hand: `import json` costs 6 ms.


def encode(value: Any, objects: list[Any]) -> str:
    """Write plain data as JSON, else its number in objects; other kinds are dicts of one item.

    Example: encode([1, (2.5, None)], []) gives '[1, {"tuple": [2.5, null]}]'
    """
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        from _json import encode_basestring_ascii

        return encode_basestring_ascii(str.__str__(value))
    if isinstance(value, (int, float, complex, bytes)):
        return _encode_number(value)
    for kind in (list, *COLLECTIONS.values()):
        if isinstance(value, kind):
            text = f"[{', '.join(encode(item, objects) for item in kind.__iter__(value))}]"
            return text if kind is list else f'{{"{kind.__name__}": {text}}}'
    if isinstance(value, dict):
        pairs = [f"[{encode(k, objects)}, {encode(v, objects)}]" for k, v in dict.items(value)]
        return f'{{"dict": [{", ".join(pairs)}]}}'
    kind_of = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind_of in STANDARD:
        return f'{{"{kind_of}": {encode([*STANDARD[kind_of](value)], objects)}}}'
    for number, item in enumerate(objects):
        if item is value:
            return f'{{"object": {number}}}'
    objects.append(value)
    return f'{{"object": {len(objects) - 1}}}'


def _encode_number(value: Any) -> str:
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**63
        return int.__repr__(value) if fits else f'{{"int": "{value:x}"}}'
    if isinstance(value, float):
        text = float.__repr__(value)
        return f'{{"float": "{text}"}}' if text in ("nan", "inf", "-inf") else text
    if isinstance(value, bytes):
        return f'{{"bytes": "{bytes.hex(value)}"}}'
    return f'{{"complex": [{_encode_number(value.real)}, {_encode_number(value.imag)}]}}'


# Arguments that make a value of a standard class again.
STANDARD: dict[str, Callable[[Any], Any]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "collections.deque": lambda value: (list(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}


def decode(value: Any, make: Callable[[int], Any]) -> Any:
    """Read the data behind parsed JSON of `encode`; raises ValueError or TypeError for other JSON.
    make(n): object n."""
    if isinstance(value, list):
        return [decode(item, make) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("a value's dict has one entry")
    ((kind, content),) = value.items()
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decode(item, make) for item in content)
    if kind == "dict":
        return {decode(key, make): decode(item, make) for key, item in content}
    if kind == "complex":
        return complex(*(float(decode(part, make)) for part in content))
    if kind == "object":
        return make(int(content))
    if kind in STANDARD:
        module, _, name = kind.rpartition(".")
        made = getattr(__import__(module), name)(*decode(content, make))
        if isinstance(made, range) and len(made) > 10**6:
            raise ValueError("a range of more than a million")
        return made
    if kind not in READERS:
        raise ValueError(f"no value is of kind {kind!r}")
    return READERS[kind](content)


COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),  # decimal digits are limited, and slow
    "float": float,
    "bytes": bytes.fromhex,
}


# ---------------------------------------------------------------- beside the solution


def solve() -> None:
    """Answer expressions about the solution until there are no more. The solution's own input is
    empty, its output discarded."""
    requests, replies = _private_streams()
    objects: list[Any] = []
    namespace: dict[str, Any] = {"__name__": "solution", OBJECTS: objects, INVOKE: _invoke}
    setattr(builtins, "exit", sys.exit)  # noqa: B010 - python -S has neither; mypy knows both
    setattr(builtins, "quit", sys.exit)  # noqa: B010
    # definitions of the problem, for a solution that relies on them
    for line in _read("before.txt").splitlines():
        with contextlib.suppress(BaseException):
            exec(eval(line), namespace)
    failed = _attempt(lambda: exec(_solution(), namespace), [])
    for line in requests:
        expression = str(eval(line))
        broken = failed if failed.startswith('{"error"') else ""
        replies.write((broken or _attempt(partial(_value, expression, namespace), objects)) + "\n")
        replies.flush()


def _value(expression: str, namespace: dict[str, Any]) -> Any:
    """Evaluate; a missing name may be a method of `Solution`, as on LeetCode and in APPS."""
    try:
        return eval(expression, namespace)
    except NameError as error:
        name = error.name
        if not name or name in namespace or "Solution" not in namespace:
            raise
        namespace[name] = getattr(namespace["Solution"](), name)
        return eval(expression, namespace)


def _solution() -> Any:
    return compile(_read("solution.py"), "solution.py", "exec")


def _read(name: str) -> str:
    with open(name, encoding="utf-8") as file:
        return file.read()


def _attempt(act: Callable[[], Any], objects: list[Any]) -> str:
    try:
        return f'{{"value": {encode(act(), objects)}}}'
    except BaseException as error:  # a solution may raise anything
        with contextlib.suppress(BaseException):
            name, text = encode(type(error).__name__, []), encode(str(error)[:500], [])
            return f'{{"error": [{name}, {text}]}}'
        return '{"error": ["Exception", ""]}'


def _invoke(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call, and its arguments after it."""
    return [function(*args, **kwargs), args]


def _private_streams() -> tuple[Any, Any]:
    """Move stdin and stdout to other numbers; 0 and 1 are then /dev/null."""
    lines, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return lines, out


# ---------------------------------------------------------------- beside the tests


class SolutionError(Exception):
    """An end of the solution's process, or an invalid value from it."""


# A loop of the test would end at one of these, and not notice the failure.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)


class Remote:
    """A stand-in for an object of the solution. It can be called, indexed, measured and read, and
    not compared: equality would be the solution's claim."""

    def __init__(self, line: "Line", source: str):
        self.__dict__.update(_line=line, _source=source)

    def __repr__(self) -> str:
        return str(self._line.ask(f"repr({self._source})"))

    def __str__(self) -> str:
        return str(self._line.ask(f"str({self._source})"))

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise SolutionError("an object of the solution cannot be compared with a value")

    __hash__ = object.__hash__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs, keep=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool) -> Any:
        """Call the object. keep: change the test's own lists and dicts as the solution did."""
        sources = f"{self._source}, {self._line.source([*args])}, {self._line.source(kwargs)}"
        reply = self._line.ask(f"{INVOKE}({sources})")
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
            raise SolutionError("a call came back as something else")
        for mine, theirs in zip(args, reply[1] if keep else ()):  # noqa: B905 - a lying solution may send fewer
            if isinstance(mine, list) and isinstance(theirs, list):
                mine[:] = theirs
            elif isinstance(mine, dict) and isinstance(theirs, dict):
                mine.clear()
                mine.update(theirs)
        return reply[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask(f"{self._source}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask(f"{self._source}[{self._line.source(key)}]")

    def __len__(self) -> int:
        return int(self._line.ask(f"len({self._source})"))

    def __bool__(self) -> bool:
        return bool(self._line.ask(f"bool({self._source})"))

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._line.ask(f"list({self._source})")])


def on_a_copy(function: Any) -> Any:
    """Make a function leave its arguments unchanged, if it is the solution's (with_copies)."""
    if not isinstance(function, Remote):
        return function
    return lambda *args, **kwargs: function._call(args, kwargs, keep=False)


class Line:
    """The line to the solution: expressions go out, plain data and stand-ins come back."""

    def __init__(self, replies: Any, requests: Any):
        self.replies, self.requests = replies, requests
        self.asked = 0

    def ask(self, expression: str) -> Any:
        import json  # solve, which must start fast, never gets here

        self.asked += 1
        try:
            self.requests.write(repr(expression) + "\n")
            self.requests.flush()
            reply = json.loads(self.replies.readline(2**24))
            if "error" not in reply:
                return decode(reply["value"], self._remote)
            name, text = (str(word) for word in reply["error"])
        except Exception as problem:
            raise SolutionError(f"no value came back: {problem}") from None
        kind: Any = vars(builtins).get(name)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ENDS):
            kind = SolutionError
        error = kind(text[:500])
        error.of_solution = True
        raise error

    def _remote(self, number: int) -> Remote:
        # a new one each time: lists take one object for equal to itself
        return Remote(self, f"{OBJECTS}[{number}]")

    def source(self, value: Any) -> str:
        """Write an expression for this value in the solution; raises TypeError if there is none."""
        if isinstance(value, Remote):
            return str(value._source)
        if value is None or type(value) in (bool, int, str, bytes):
            return repr(value)
        if type(value) in (float, complex):
            return f"{type(value).__name__}({str(value)!r})"
        if type(value) in (list, tuple, set, frozenset):
            return f"{type(value).__name__}([{', '.join(map(self.source, value))}])"
        if type(value) is dict:
            pairs = [f"({self.source(key)}, {self.source(item)})" for key, item in value.items()]
            return f"dict([{', '.join(pairs)}])"
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind in STANDARD:
            module, _, name = kind.rpartition(".")
            arguments = ", ".join(map(self.source, STANDARD[kind](value)))
            return f"__import__({module!r}).{name}({arguments})"
        raise TypeError(f"a {type(value).__name__} of the test cannot be sent to the solution")


def test() -> None:
    """Run every script of tests.json in a namespace of its own; the verdicts go to stderr.

    tests.json: {"scripts": [...], "before": [...], "names": [...], "entry_point": ""}. before:
    statements that make names for the scripts; names: those that the solution makes.
    """
    import json

    replies, requests = _private_streams()
    verdicts = os.dup(2)
    os.dup2(1, 2)
    line = Line(replies, requests)
    tests = json.loads(_read("tests.json"))
    reports = [_verdict(line, script, tests) for script in tests["scripts"]]
    os.write(verdicts, json.dumps(reports).encode())


def _verdict(line: Line, script: str, tests: dict[str, Any]) -> list[str]:
    """Return [] if a script passed, else [reason, the name or module that the script lacked]."""
    try:
        provided = {name: line.ask(name) for name in tests["names"]}
        before = line.asked
        _run_script(script, provided, tests)
    except SystemExit as error:  # a script that did not come to its end did not pass
        return [f"exit with {error.code}"[:200], ""]
    except BaseException as error:  # nor did this one
        own = isinstance(error, (ImportError, NameError)) and not hasattr(error, "of_solution")
        lacked = getattr(error, "name", "") if own else ""
        return [f"{type(error).__name__}: {error}"[:200], lacked or ""]
    idle = line.asked == before and all(isinstance(value, Remote) for value in provided.values())
    return ["the script never used the solution", ""] if idle else []


def _run_script(script: str, provided: dict[str, Any], tests: dict[str, Any]) -> None:
    """Run a test script, then its HumanEval `check`, cases of unittest, tests of pytest."""
    # unittest.main looks for its cases in the first
    module, solution = ModuleType("__main__"), ModuleType("solution")
    sys.modules["__main__"], sys.modules["solution"] = module, solution
    for statement in tests["before"]:
        with contextlib.suppress(ImportError):  # it may be the solution's only
            exec(statement, vars(module))
    vars(module).update(provided, **{COPY: on_a_copy})
    vars(solution).update(provided)
    there = set(vars(module))
    with contextlib.suppress(SystemExit) if "unittest.main" in script else contextlib.nullcontext():
        exec(compile(script, "test", "exec"), vars(module))
    own = {name: value for name, value in vars(module).items() if name not in there}
    if tests["entry_point"] and "check" in own:
        own["check"](provided[tests["entry_point"]])
        return
    if "unittest" in sys.modules:
        _run_cases(module)
    for name, value in own.items():
        if name.startswith("test_") and callable(value):
            _run_test(value)
        elif name.startswith("Test") and isinstance(value, type) and not hasattr(value, "run"):
            _run_class(value)  # unittest's classes have `run`


def _run_class(cases: type) -> None:
    for method in [name for name in dir(cases) if name.startswith("test")]:
        case = cases()
        if setup := getattr(case, "setup_method", None):
            setup(*[None] * (setup.__code__.co_argcount - 1))  # pytest gives the method, if wanted
        _run_test(getattr(case, method))


def _run_test(test: Any) -> None:
    """Call a test function, once for each row of its `pytest.mark.parametrize`."""
    for arguments in getattr(test, "cases", [{}]):
        test(**arguments)


def _run_cases(module: ModuleType) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    for _, trace in [*result.errors, *result.failures]:
        raise AssertionError(trace.strip().rpartition("\n")[2])


if __name__ == "__main__":
    {"solve": solve, "test": test}[sys.argv[1]]()
