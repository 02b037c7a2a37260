"""Reward functions that read only what stands behind a completion's thoughts."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from tandem.registry import find
from tandem.rewards.parts import BadValue
from tandem.types import Problem

Function = Callable[..., Any]


def behind_thoughts(function: Function) -> Function:
    """Make a reward function read only what stands behind the thoughts; `opened`: the prompt opens
    them, so that without their end all is thoughts.

    A checker(problem, completion, extract, **options) gets `extract`; its ValueError: a bad row.
    """
    signature = inspect.signature(function)
    given = (
        {"extract": find("extractors", "answer", key="reward.function")}
        if "extract" in signature.parameters
        else {}
    )

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


# gpt-oss, and without its special tokens "analysis...assistantfinal..."; Gemma 4
_END_OF_THOUGHTS = re.compile(
    r"</think>|assistantfinal|<\|channel\|>final<\|message\|>|<channel\|>"
)
_THOUGHTS = re.compile(
    r"(?m)^\s*<think>|\A(?:<\|channel\|>)?analysis(?=[^\s:.,;])|\A<\|channel>thought"
)
