"""Inputs of a command that trains, read and checked before any weights are loaded: data, models by
their configs, lengths.

Those of `tandem train` are here; the registry has all of them by command. The jobs begin with them,
and `tandem plan` uses them to tell whether a run could start. They know no weights, engines or run
folders.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.schema import Config
from tandem.data.mixture import only
from tandem.data.problems import read_problems
from tandem.data.readers import SUITE
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.jobs.engines import require_room
from tandem.jobs.exactness import require_correction
from tandem.jobs.input_hashes import image_hashes, input_hashes
from tandem.jobs.models import check_models, check_tokenizer, placement
from tandem.model.paths import path_of
from tandem.model.rope import positions_of
from tandem.registry import built_in
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.types import Problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Size of the data behind a key.

    Example: Count(number=400, unit="problems", longest=41, mean=23.5)
    """

    number: int
    unit: str
    longest: int  # tokens of the longest prompt, chat or answer
    mean: float  # tokens of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs that every command has."""

    keys: tuple[str, ...]  # of the data that a run is a function of
    shape: Any  # transformers config of model.path
    renderer: ChatRenderer
    held_out: Sequence[Problem]  # of eval.data; empty without
    counts: dict[str, Count]  # by data key
    images: dict[str, str] = field(default_factory=dict)  # SHA-256 of those in the data, or {}

    def hashes(self, config: Config) -> dict[str, str]:
        """Hash the files that a run is a function of; SHA-256 by key."""
        return input_hashes(config, *self.keys) | self.images


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemInputs(Inputs):
    """Inputs of `tandem train` and `tandem distill`."""

    keys: tuple[str, ...] = ("data.train", "eval.data")
    problems: Sequence[Problem]


def read_data(config: Config, key: Literal["data.train", "eval.data"]) -> Sequence[Problem]:
    """Read the problems that a key names; without eval.data there are none."""
    source, weights = (
        (config.data.train, config.data.weights) if key == "data.train" else (config.eval.data, [])
    )
    if key == "data.train" and not source:
        raise missing("no training problems are named", key, "a source, see docs/guide/data.md")
    functions = config.reward.functions
    if key == "eval.data" and config.eval.data.startswith(SUITE) and "suite" not in functions:
        logger.warning(
            "reward.function = %s grades %s; reward=suite grades it as its own grader does",
            ", ".join(functions),
            config.eval.data,
        )
    return read_problems(source, config.data, key=key, weights=weights) if source else []


def training_inputs(config: Config) -> ProblemInputs:
    """Read and check the inputs of `tandem train`. Raises UserError, as all do."""
    if config.model.reference and not config.rl.kl_coef:
        raise UserError(
            "a setting that would never be used",
            where=f"model.reference = {config.model.reference}",
            found="rl.kl_coef = 0",
            expected="a KL term",
            next="set rl.kl_coef, or drop it",
        )
    others = ["model.reference", *(["critic.path"] if config.rl.estimator.needs_critic else [])]
    return problem_inputs(config, *others)


def problem_inputs(config: Config, *others: str) -> ProblemInputs:
    """Read and check problems. others: further keys that name models."""
    require_correction(config)
    named = {"losses": config.rl.loss, "advantages": config.rl.advantage}
    if config.rl.filter or any(name not in built_in(kind) for kind, name in named.items()):
        from tandem.rl.user_functions import try_functions

        try_functions(config.rl.policy_loss, config.rl.estimator, config.rl.filter)
    data, held_out = read_data(config, "data.train"), read_data(config, "eval.data")
    if "answer" in config.reward.functions and not any(problem.answer for problem in data):
        raise UserError(
            "the reward compares with the problems' answers, and all of them are empty",
            where="data.train, reward.function = answer",
            found=f"data.answer_column = {config.data.answer_column!r}",
            expected="a column with answers",
            next="set data.answer_column=NAME, or another reward.function",
        )
    shape = check_models(config, *others)
    where = f"model.path = {config.model.path}"
    place = placement(config)
    reason = path_of(shape, where, place).gap(shape, place)
    require_correction(config, reason and f"{where}, {reason}")
    renderer = load_renderer(config.model.path, config.data.chat_template)
    check_tokenizer(config, shape, renderer)
    fitting, counts = _fitting(config, data, "data.train", shape, renderer)
    problems = only(data, fitting)
    _check_repeats(config, len(problems))
    held_out, held_out_counts = held_out_of(config, held_out, shape, renderer)
    return ProblemInputs(
        shape=shape,
        renderer=renderer,
        problems=problems,
        held_out=held_out,
        counts=counts | held_out_counts,
        images=image_hashes(p.messages for p in (*problems, *held_out)),
    )


def held_out_of(
    config: Config, problems: Sequence[Problem], shape: Any, renderer: ChatRenderer
) -> tuple[Sequence[Problem], dict[str, Count]]:
    """Return the held-out problems whose prompts are short enough, and their count."""
    if not problems:
        return [], {}
    if config.eval.metric:
        from tandem.rl.user_functions import try_user_metric

        try_user_metric(config.eval.metric)
    return _fitting(config, problems, "eval.data", shape, renderer)


def _fitting(
    config: Config, problems: Sequence[Problem], key: str, shape: Any, renderer: ChatRenderer
) -> tuple[Sequence[Problem], dict[str, Count]]:
    """Return the problems whose prompts are short enough, and their count."""
    room = positions_of(shape) - config.rollout.max_new_tokens  # before a completion
    fitting, lengths = renderer.check_lengths(problems, config.data, key=key, room=room)
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    require_room(config, shape, longest)
    return fitting, {key: Count(number=len(lengths), unit="problems", longest=longest, mean=mean)}


def _check_repeats(config: Config, problems: int) -> None:
    """Warn of steps with more prompts than there are problems; a curriculum cannot make them."""
    wanted = config.rl.prompts_per_step
    if wanted <= problems:
        return
    if config.rl.curriculum:
        raise UserError(
            "a curriculum picks every problem at most once a step",
            where="rl.prompts_per_step",
            found=f"{wanted}, of {problems} problems",
            expected=f"at most {problems}",
            next=f"rl.prompts_per_step={problems}",
        )
    logger.warning(
        "rl.prompts_per_step is %s and data.train has %s: a step is %s, and each problem "
        "is in it %.1f times. Set rl.prompts_per_step to %s at most, or take more problems",
        f"{wanted:,}",
        counted(problems, "problems"),
        counted(wanted * config.rl.group_size, "episodes"),
        wanted / problems,
        problems,
    )


def missing(what: str, key: str, expected: str) -> UserError:
    """Return the error of a key that the command needs."""
    return UserError(what, where=key, expected=expected, next=f"add {key}=...")
