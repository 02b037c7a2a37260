"""The short reward functions among the built-in ones; docs/guide/rewards.md shows each, and the
registry has the names of all.

Each is a Tandem reward function: score(problem, completion), some with `attempt`, options as
keyword arguments. They run in killable workers, so a user's pattern or schema may take forever.
Knows neither processes nor weights.

    python -c "from tandem.rewards.builtin import exact; from tandem.types import Problem; \
        print(exact(Problem(uid='', messages=(), answer='Yes'), ' yes', casefold=True))"
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from tandem import registry
from tandem.rewards.parts import BadFunction, BadValue, checked_by
from tandem.types import Attempt, Problem

Function = Callable[..., Any]


def find(name: str) -> Function:
    """Return the function of that name, imported here; raises BadFunction."""
    known = sorted(registry.names("rewards"))
    if name in known:
        return registry.find("rewards", name, key="reward.function")  # type: ignore[no-any-return]
    if name.endswith(".py"):
        raise BadFunction(f"{name!r} names a file and no function in it, as {name}:score does")
    plain = re.sub("^(get|compute|calculate)_|_(reward|score)$", "", name.lower())
    near = difflib.get_close_matches(plain, [*known, *ELSEWHERE], 1, 0.5)
    hint = f"; did you mean {ELSEWHERE.get(near[0], near[0])!r}?" if near else "."
    raise BadFunction(f"no built-in {name!r}{hint} The built-in ones are {', '.join(known)}")


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


def behind_thoughts(function: Function) -> Function:
    """Make a reward function read only what stands behind the thoughts; `opened`: the prompt opens
    them, so that without their end all is thoughts."""

    @wraps(function)
    def reward(problem: Problem, completion: str, opened: bool = False, **options: Any) -> float:
        *thoughts, text = _END_OF_THOUGHTS.split(completion)
        text = _THOUGHTS.split(text)[0] if thoughts or not opened else ""
        return float(function(problem, text, **options))

    signature = inspect.signature(function)
    more = inspect.Parameter("opened", inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [*signature.parameters.values(), more]
    reward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    reward.__annotations__ = {**function.__annotations__, "opened": bool}
    return reward


# gpt-oss, and without its special tokens "analysis...assistantfinal..."; Gemma 4
_END_OF_THOUGHTS = re.compile(
    r"</think>|assistantfinal|<\|channel\|>final<\|message\|>|<channel\|>"
)
_THOUGHTS = re.compile(
    r"(?m)^\s*<think>|\A(?:<\|channel\|>)?analysis(?=[^\s:.,;])|\A<\|channel>thought"
)


# ---------------------------------------------------------------- is it the answer?


@behind_thoughts
def exact(
    problem: Problem, completion: str, *, strip: bool = True, casefold: bool = False
) -> float:
    """Return 1 if the whole completion is the ground truth."""
    texts = [completion, problem.answer]
    texts = [text.strip() for text in texts] if strip else texts
    one, other = [text.casefold() for text in texts] if casefold else texts
    return float(one == other)


def _check_pattern(options: Mapping[str, Any]) -> None:
    try:
        re.compile(options.get("pattern", ""))
    except re.error as error:
        raise BadFunction(f"regex: {options['pattern']!r} is no pattern: {error}") from None


@checked_by(_check_pattern)
def regex(problem: Problem, completion: str, *, pattern: str = "", full: bool = False) -> float:
    """Return 1 if the pattern is found (full: matches all of the stripped completion).

    The pattern is the option, else metadata["pattern"], else the answer.
    """
    wanted = pattern or problem.metadata.get("pattern") or problem.answer
    match = re.fullmatch(wanted, completion.strip()) if full else re.search(wanted, completion)
    return float(match is not None)


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


def _check_sizes(options: Mapping[str, Any]) -> None:
    if not 0 <= options.get("target", 0) < options.get("limit", 0):
        raise BadFunction(f"length: found {dict(options)}, expected 0 <= target < limit")


@checked_by(_check_sizes)
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


# ---------------------------------------------------------------- JSON, by the extra `schema`

JSON_CHARS = 20_000  # of the end of a completion
NOTHING = object()  # no JSON in a text


def check_schema(options: Mapping[str, Any]) -> None:
    """Refuse an invalid schema, and a machine without jsonschema; raises BadFunction."""
    try:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import validator_for
    except ImportError:
        raise BadFunction(
            "json_schema needs the package jsonschema: pip install 'tandem-rl[schema]'"
        ) from None
    schema = options.get("schema", {})
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise BadFunction(f"json_schema: the option is no schema: {error.message}") from None


@checked_by(check_schema)
@behind_thoughts
def json_schema(problem: Problem, completion: str, *, schema: dict[str, Any] = {}) -> float:  # noqa: B006
    """Return 1 if the last JSON value of the completion is valid under the option `schema`, or,
    without one, metadata["schema"]."""
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    wanted = schema or problem.metadata.get("schema")
    if not isinstance(wanted, (dict, bool)):
        raise BadValue(f"json_schema: {problem.uid!r} has no `schema`, and no option has one")
    value = last_json(completion)
    return 0.0 if value is NOTHING else float(validator_for(wanted)(wanted).is_valid(value))


def last_json(text: str) -> Any:
    """Return the whole text as JSON, else the last fenced block of JSON, else the last object or
    list in the text, else NOTHING."""
    text = text[-JSON_CHARS:].strip()
    blocks = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", text, re.DOTALL)
    for candidate in (text, *blocks[:-4:-1]):
        try:
            return json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
    value, at, decoder = NOTHING, 0, json.JSONDecoder(parse_constant=_refuse)
    for opening in re.finditer(r"[{\[]", text):
        if opening.start() < at:  # inside the one before
            continue
        try:
            value, at = decoder.raw_decode(text, opening.start())
        except ValueError:
            continue
        except RecursionError:  # each of the next thousand would be as deep
            return NOTHING
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
