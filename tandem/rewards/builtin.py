"""The built-in reward functions by name, and the short ones among them; docs/rewards.md shows each.

Each is a Tandem reward function: score(problem, completion), some with `attempt`, options as
keyword arguments. They run in killable workers, so a user's pattern or schema may take forever.
Knows neither processes nor weights.

    python -c "from tandem.rewards.builtin import numeric; from tandem.types import Problem; \
        print(numeric(Problem(uid='', messages=(), answer='3.14'), 'about 3.1', tolerance=0.1))"
"""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import wraps
from typing import Any

from tandem.plugins.graders.answer import TEXT_CHARS, extract, score
from tandem.plugins.graders.answer_compare import Loading, ignore_loading
from tandem.plugins.graders.answer_numbers import Number, parse_number, written_numbers
from tandem.plugins.tasks.registry import TASKS
from tandem.rewards.parts import BadFunction, BadValue
from tandem.rewards.schema import check_schema, json_schema
from tandem.types import Attempt, Problem

Function = Callable[..., Any]


def find(name: str) -> Function:
    """Return the function of that name, imported here if it imports much; raises BadFunction."""
    match name:
        case "code":
            from tandem.plugins.graders.code import code_reward

            return code_reward
        case "judge":
            from tandem.rewards.judge import judge

            return judge
        case "reasoning_gym":
            from tandem.plugins.tasks import reasoning_gym

            return behind_thoughts(reasoning_gym.score)
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name.endswith(".py"):
        raise BadFunction(f"{name!r} names a file and no function in it, as {name}:score does")
    plain = re.sub("^(get|compute|calculate)_|_(reward|score)$", "", name.lower())
    near = difflib.get_close_matches(plain, [*NAMES, *ELSEWHERE], 1, 0.5)
    hint = f"; did you mean {ELSEWHERE.get(near[0], near[0])!r}?" if near else "."
    raise BadFunction(f"no built-in {name!r}{hint} The built-in ones are {', '.join(NAMES)}")


def check(name: str, options: Mapping[str, Any]) -> None:
    """Refuse impossible values of options, before the first item; raises BadFunction."""
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


def behind_thoughts(function: Function) -> Function:
    """Make a reward function read only what stands behind the thoughts; `opened`: the prompt opens
    them, so that without their end all is thoughts.

    A checker(problem, completion, extract, **options) gets `extract`; its ValueError: a bad row.
    """
    signature = inspect.signature(function)
    given = {"extract": extract} if "extract" in signature.parameters else {}

    @wraps(function)
    def reward(problem: Problem, completion: str, opened: bool = False, **options: Any) -> float:
        *thoughts, text = _END_OF_THOUGHTS.split(completion)
        text = _THOUGHTS.split(text)[0] if thoughts or not opened else ""
        try:
            return float(function(problem, text, **given, **options))
        except ValueError as error:
            if not given:
                raise
            raise BadValue(str(error)) from None

    kept = [p for p in signature.parameters.values() if p.name not in given]
    kept.append(inspect.Parameter("opened", inspect.Parameter.KEYWORD_ONLY, default=False))
    reward.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    reward.__annotations__ = {**function.__annotations__, "opened": bool}
    return reward


# gpt-oss, without its special tokens: "analysis...assistantfinal..."
_END_OF_THOUGHTS = re.compile("</think>|assistantfinal")
_THOUGHTS = re.compile(r"(?m)^\s*<think>|\Aanalysis(?=[^\s:.,;])")


# ---------------------------------------------------------------- is it the answer?


@behind_thoughts
def answer(problem: Problem, completion: str, loading: Loading = ignore_loading) -> float:
    """Return 1 if the final answer is the ground truth, as number, list, text, choice or formula
    (answer.py)."""
    return score(completion, problem.answer, loading)


@behind_thoughts
def exact(
    problem: Problem, completion: str, *, strip: bool = True, casefold: bool = False
) -> float:
    """Return 1 if the whole completion is the ground truth."""
    texts = [completion, problem.answer]
    texts = [text.strip() for text in texts] if strip else texts
    one, other = [text.casefold() for text in texts] if casefold else texts
    return float(one == other)


@behind_thoughts
def numeric(
    problem: Problem, completion: str, *, tolerance: float = 1e-6, relative: float = 0.0
) -> float:
    """Return 1 if the final answer, else the last number of the completion, is near the ground
    truth: |number - truth| <= max(tolerance, relative x |truth|). 50% is 0.5. Compared as
    fractions."""
    parsed = parse_number(problem.answer)
    if parsed is None:
        raise _bad_answer(problem, "a number")
    number, truth = _number(completion), _value(parsed)
    if number is None:
        return 0.0
    allowed = max(Fraction(str(tolerance)), Fraction(str(relative)) * abs(truth))
    return float(abs(_value(number) - truth) <= allowed)


def _number(completion: str) -> Number | None:
    """Read the number of the final answer; in an answer with words ("about 3.1 cm") the only
    number, as two are two guesses."""
    final = extract(completion)
    if final is None:
        written = written_numbers(completion[-TEXT_CHARS:])[-1:]
    else:
        written = [final] if parse_number(final) else written_numbers(final)
    return parse_number(written[0]) if len(written) == 1 else None


def _value(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


_CHOICE = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:,]|\s|$)")


@behind_thoughts
def choice(problem: Problem, completion: str) -> float:
    """Return 1 if the chosen letter is the ground truth's: the letter of the final answer ("Answer:
    (B) 12"), else the last one in parentheses, else one alone in the last line."""
    truth = _CHOICE.match(problem.answer.strip())
    if truth is None:
        raise _bad_answer(problem, "a letter")
    return float(_letter(completion[-TEXT_CHARS:]) == truth[1].upper())


def _letter(text: str) -> str:
    final = extract(text)
    if final is not None:
        chosen = _CHOICE.match(re.sub(r"\\(?:text|mathrm|textbf)\{|[}$*_`]", "", final).strip())
        return chosen[1].upper() if chosen else ""
    in_parentheses = re.findall(r"\(([A-Z])\)", text)
    if in_parentheses:
        return str(in_parentheses[-1])
    last = text.strip().rpartition("\n")[2].strip(" .*_`")
    return last.upper() if len(last) == 1 else ""


def regex(problem: Problem, completion: str, *, pattern: str = "", full: bool = False) -> float:
    """Return 1 if the pattern is found (full: matches all of the stripped completion).

    The pattern is the option, else metadata["pattern"], else the answer.
    """
    wanted = pattern or problem.metadata.get("pattern") or problem.answer
    match = re.fullmatch(wanted, completion.strip()) if full else re.search(wanted, completion)
    return float(match is not None)


def _bad_answer(problem: Problem, expected: str) -> BadValue:
    return BadValue(
        f"the answer {problem.answer[:100]!r} of problem {problem.uid!r} is not {expected}"
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
    """Return 1 if the completion is <think>...</think> and then text.

    tags: each once, in order, not empty, with nothing before or between them. opened: the prompt
    has opened the first one. rest: text must follow the last; else none may.
    """
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
    """Return 1 up to `target` characters (or words), falling evenly to 0 at `limit`; a negative
    weight makes it a penalty."""
    if unit not in ("characters", "words"):
        raise BadValue(f"length: unit is {unit!r}, expected characters or words")
    size = len(completion) if unit == "characters" else len(completion.split())
    return min(1.0, max(0.0, (limit - size) / (limit - target)))


# ---------------------------------------------------------------- what others know


def env(problem: Problem, completion: str, attempt: Attempt) -> dict[str, float]:
    """Return the environment's reward, the sum of all turns; its other numbers are parts."""
    reward = _given(attempt, "env", "this environment gives no reward: set env.name")
    others = attempt.env_rewards.items()
    return {**{k: v for k, v in others if k not in ("env", "reward_model")}, "reward": reward}


def reward_model(problem: Problem, completion: str, attempt: Attempt) -> float:
    """Return the score of reward.model, which the trainer has asked."""
    return _given(attempt, "reward_model", "no reward model was asked: set reward.model")


def _given(attempt: Attempt, name: str, why: str) -> float:
    if name not in attempt.env_rewards:
        raise BadValue(why)
    return attempt.env_rewards[name]


FUNCTIONS: dict[str, Function] = {
    "answer": answer,
    "choice": choice,
    "env": env,
    "exact": exact,
    "format": format_of_tags,
    "json_schema": behind_thoughts(json_schema),
    "length": length,
    "numeric": numeric,
    "regex": regex,
    "reward_model": reward_model,
}
FUNCTIONS |= {
    name: behind_thoughts(task.checker) for name, task in TASKS.items() if task.checker is not None
}
NAMES = sorted([*FUNCTIONS, "code", "judge", "reasoning_gym"])
# what other libraries (TRL, verl, open-r1) call them
ELSEWHERE = {
    **dict.fromkeys(("accuracy", "reasoning_accuracy", "correctness", "math", "gsm8k"), "answer"),
    **dict.fromkeys(("think_format", "tag_count"), "format"),
    **dict.fromkeys(("exact_match", "string_match"), "exact"),
    **dict.fromkeys(("soft_overlong_punishment", "overlong"), "length"),
    "unit_tests": "code",
    "multiple_choice": "choice",
    "preference_model": "reward_model",
}
