"""The built-in reward functions by name, and those of them that are short. docs/rewards.md shows
each.

Each is a Tandem reward function: score(problem, completion), some with `attempt`, options as
keyword arguments. They run in killable workers, so a user's pattern or schema may take forever. It
knows neither processes nor weights.

    python -c "from tandem.rewards.builtin import numeric; from tandem.types import Problem; \
        print(numeric(Problem(uid='', messages=(), answer='3.14'), 'about 3.1', tolerance=0.1))"
"""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from tandem.rewards import answer as verifier
from tandem.rewards import answer_numbers as numbers
from tandem.rewards.answer_compare import Loading, ignore_loading
from tandem.rewards.countdown import countdown
from tandem.rewards.parts import BadFunction, BadValue
from tandem.rewards.schema import check_schema, json_schema
from tandem.types import Attempt, Problem

Name = Literal[
    "answer",
    "choice",
    "code",
    "countdown",
    "env",
    "exact",
    "format",
    "json_schema",
    "judge",
    "length",
    "numeric",
    "reasoning_gym",
    "regex",
    "reward_model",
]


def find(name: str) -> Callable[..., Any]:
    """The function of that name; raises BadFunction. What an extra is needed for is imported
    here."""
    match name:
        case "answer":
            return answer
        case "choice":
            return choice
        case "code":
            return code
        case "countdown":
            return countdown
        case "env":
            return env
        case "exact":
            return exact
        case "format":
            return format_of_tags
        case "json_schema":
            return json_schema
        case "judge":
            from tandem.rewards.judge import judge  # with it comes the network

            return judge
        case "length":
            return length
        case "numeric":
            return numeric
        case "reasoning_gym":
            return reasoning_gym()
        case "regex":
            return regex
        case "reward_model":
            return reward_model
    if name.endswith(".py"):
        raise BadFunction(f"{name!r} names a file and no function in it, as {name}:score does")
    near = difflib.get_close_matches(name, get_args(Name), 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise BadFunction(
        f"no built-in {name!r}{hint} The built-in ones are {', '.join(get_args(Name))}"
    )


def check(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options whose values cannot work, before the first item; raises BadFunction."""
    match name:
        case "regex":
            try:
                re.compile(options.get("pattern", ""))
            except re.error as error:
                raise BadFunction(f"regex: {options['pattern']!r} is no pattern: {error}") from None
        case "length":
            if not 0 <= options.get("target", 0) < options.get("limit", 0):
                raise BadFunction(f"length: found {dict(options)}, expected 0 <= target < limit")
        case "json_schema":
            check_schema(options.get("schema", {}))
        case "judge":
            from tandem.rewards.judge import check_judge

            check_judge(options)


# ---------------------------------------------------------------- is it the answer?


def answer(problem: Problem, completion: str, loading: Loading = ignore_loading) -> float:
    """1 if the final answer is the ground truth, as number, list, text, choice or formula
    (answer.py)."""
    return verifier.score(completion, problem.answer, loading)


def exact(
    problem: Problem, completion: str, *, strip: bool = True, casefold: bool = False
) -> float:
    """1 if the whole completion is the ground truth."""
    one, other = completion, problem.answer
    if strip:
        one, other = one.strip(), other.strip()
    return float(one.casefold() == other.casefold() if casefold else one == other)


def numeric(
    problem: Problem, completion: str, *, tolerance: float = 1e-6, relative: float = 0.0
) -> float:
    """1 if the final answer, or else the last number of the completion, is within a tolerance of
    the ground truth:
    |number - truth| <= max(tolerance, relative x |truth|). 50% is 0.5. Compared exactly, as fractions."""
    truth = numbers.parse_number(problem.answer)
    if truth is None:
        raise BadValue(
            f"the answer {problem.answer[:100]!r} of problem {problem.uid!r} is not a number"
        )
    number = _number(completion)
    if number is None:
        return 0.0
    wrong = abs(_value(number) - _value(truth))
    return float(
        wrong <= max(Fraction(str(tolerance)), Fraction(str(relative)) * abs(_value(truth)))
    )


def _number(completion: str) -> numbers.Number | None:
    """The final answer's; of an answer with words around it ("about 3.1 cm") the only one, as two
    are two guesses."""
    final = verifier.extract(completion)
    if final is None:
        written = numbers.written_numbers(completion[-verifier.TEXT_CHARS :])[-1:]
    else:
        written = [final] if numbers.parse_number(final) else numbers.written_numbers(final)
    return numbers.parse_number(written[0]) if len(written) == 1 else None


def _value(number: numbers.Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


_CHOICE = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:,]|\s|$)")


def choice(problem: Problem, completion: str) -> float:
    """1 if the letter chosen is the ground truth's: that of the final answer ("Answer: (B) 12"),
    else the last letter in parentheses, else a letter alone in the last line."""
    truth = _CHOICE.match(problem.answer.strip())
    if truth is None:
        raise BadValue(
            f"the answer {problem.answer[:100]!r} of problem {problem.uid!r} is not a letter"
        )
    return float(_letter(completion[-verifier.TEXT_CHARS :]) == truth[1].upper())


def _letter(text: str) -> str:
    final = verifier.extract(text)
    if final is not None:
        chosen = _CHOICE.match(re.sub(r"\\(?:text|mathrm|textbf)\{|[}$*_`]", "", final).strip())
        return chosen[1].upper() if chosen else ""
    in_parentheses = re.findall(r"\(([A-Z])\)", text)
    if in_parentheses:
        return str(in_parentheses[-1])
    last = text.strip().rpartition("\n")[2].strip(" .*_`")
    return last.upper() if len(last) == 1 else ""


def regex(problem: Problem, completion: str, *, pattern: str = "", full: bool = False) -> float:
    """1 if the pattern is found (full: matches the whole, stripped). It is the option, else
    metadata["pattern"], else the answer."""
    wanted = pattern or problem.metadata.get("pattern") or problem.answer
    return float(
        bool(re.fullmatch(wanted, completion.strip()) if full else re.search(wanted, completion))
    )


# ---------------------------------------------------------------- how is it written?


def format_of_tags(
    problem: Problem,
    completion: str,
    *,
    tags: list[str] = ["think"],  # noqa: B006
    opened: bool = False,
    rest: bool = True,
) -> float:
    """1 if the completion is <think>...</think> and then text: each of `tags` once, in order, not
    empty, nothing before or between them. opened: the prompt has opened the first one already.
    rest: text must follow the last; else none may."""
    text = f"<{tags[0]}>{completion}" if opened and tags else completion
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in tags):
        return 0.0
    for tag in tags:
        before, _, after = text.partition(f"<{tag}>")
        inside, closed, text = after.partition(f"</{tag}>")
        if before.strip() or not closed or not inside.strip():
            return 0.0
    return float(bool(text.strip()) == rest)


def length(
    problem: Problem, completion: str, *, target: int = 0, limit: int = 0, unit: str = "characters"
) -> float:
    """1 up to `target` characters (or words), falling evenly to 0 at `limit`. Use a weight to make
    it a penalty."""
    match unit:
        case "characters":
            size = len(completion)
        case "words":
            size = len(completion.split())
        case _:
            raise BadValue(f"length: unit is {unit!r}, expected characters or words")
    return min(1.0, max(0.0, (limit - size) / (limit - target)))


# ---------------------------------------------------------------- what others know


def env(problem: Problem, completion: str, attempt: Attempt) -> dict[str, float]:
    """What the environment gave, in the sum of all turns; what else it told is parts."""
    others = {
        name: value for name, value in attempt.given.items() if name not in ("env", "reward_model")
    }
    return {
        **others,
        "reward": _given(attempt, "env", "this environment gives no reward: set env.name"),
    }


def reward_model(problem: Problem, completion: str, attempt: Attempt) -> float:
    """What the reward model of reward.model said; the trainer has asked it."""
    return _given(attempt, "reward_model", "no reward model was asked: set reward.model")


def _given(attempt: Attempt, name: str, why: str) -> float:
    if name not in attempt.given:
        raise BadValue(why)
    return attempt.given[name]


def reasoning_gym() -> Callable[..., Any]:
    """The package's own scorer of the row's task. By name, as the file that makes those rows also
    has the scorer."""
    score: Callable[..., Any] = importlib.import_module("tandem.tasks.reasoning_gym").score
    return score


def code(
    problem: Problem,
    completion: str,
    *,
    sandbox: dict[str, Any] = {},  # noqa: B006
    timeout_s: float = 4.0,
    test_timeout_s: float = 2.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    tolerance: float = 0.0,
) -> dict[str, float]:
    """The share of the problem's tests that the completion's program passes (code.py); sandbox: the
    config's section."""
    from tandem.config.schema import Sandbox
    from tandem.rewards.code import code_reward

    return code_reward(
        problem,
        completion,
        sandbox=Sandbox(**sandbox),
        timeout_s=timeout_s,
        test_timeout_s=test_timeout_s,
        memory_mb=memory_mb,
        all_or_nothing=all_or_nothing,
        tolerance=tolerance,
    )
