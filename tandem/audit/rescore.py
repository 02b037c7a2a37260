"""Score the episodes of a journal file again, with the run's reward functions, and compare with
what was recorded.

What cannot be repeated is read back instead: the word of a judge, what an environment or a reward
model gave (the reward function reads it in the episode, so the rest of the reward is repeated), and
episodes whose scoring failed, as that may have been a matter of time. It does not know how a step
learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.schema import Config
from tandem.jobs.engines import build_reward_pool
from tandem.jobs.inputs import read_data
from tandem.rewards.parts import part_name
from tandem.rollout.score import with_reward
from tandem.runtime.errors import UserError
from tandem.types import Episode, Group

JUDGE = "judge"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that is not as the run recorded it."""

    what: str
    recorded: str
    found: str
    also: str = ""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How many episodes were scored again, what was read back instead, and the first that came out
    otherwise."""

    episodes: int
    notes: list[str]
    difference: Difference | None


def rescored(config: Config, groups: Sequence[Group], step: int) -> Scoring:
    """Score all episodes of step `step` again, up to the first whose reward, parts or error
    differ."""
    functions = config.reward.functions
    notes = _read_back(config)
    if functions == [JUDGE]:
        return Scoring(episodes=0, notes=notes, difference=None)
    everyone = [e for group in groups for e in group.episodes if e.stop_reason != "paused"]
    failed = sum(bool(e.reward_error) for e in everyone)
    if failed:
        notes.append(f"episodes whose scoring failed are read back: {failed}")
    again = [e for e in everyone if not e.reward_error]
    whole = JUDGE not in functions
    problems = {problem.uid: problem for problem in read_data(config, "data.train")}
    if missing := [e.uid for e in again if e.uid not in problems]:
        raise UserError(
            "a problem of the step is not in the data",
            where="data.train",
            found=f"no {missing[0]}",
            expected="the data that the run began with",
            next="restore it",
        )
    with build_reward_pool(config if whole else _without_judge(config)) as pool:
        verdicts = [pool.submit(problems[e.uid], e.attempt()) for e in again]
        for episode, verdict in zip(again, verdicts, strict=True):
            found = with_reward(
                episode, verdict.result(), config.reward, config.rollout.max_new_tokens
            )
            if otherwise := _compare(episode, found, config, step, whole):
                return Scoring(episodes=len(again), notes=notes, difference=otherwise)
    return Scoring(episodes=len(again), notes=notes, difference=None)


def _read_back(config: Config) -> list[str]:
    functions = config.reward.functions
    told = {
        JUDGE: "the judge's word is read back",
        "env": "what the environment gave is read back",
        "reward_model": "the reward model's word is read back",
    }
    return [text for name, text in told.items() if name in functions]


def _without_judge(config: Config) -> Config:
    """The other functions; with weights, so that each one's reward is a part under its own name."""
    how = config.reward
    kept = [
        (f, w)
        for f, w in zip(how.functions, how.weights or [1.0] * len(how.functions), strict=True)
        if f != JUDGE
    ]
    return config.model_copy(
        update={
            "reward": how.model_copy(
                update={
                    "function": [f for f, _ in kept],
                    "weights": [w for _, w in kept],
                    "options": {
                        name: value for name, value in how.options.items() if name != JUDGE
                    },
                }
            )
        }
    )


def _compare(
    recorded: Episode, found: Episode, config: Config, step: int, whole: bool
) -> Difference | None:
    who = f"episode {step}:{recorded.uid}:{recorded.sample_index}"
    if found.reward_error:
        return Difference(
            what=f"score of {who}",
            recorded=f"{recorded.reward!r}, without an error",
            found=found.reward_error,
        )
    if whole and recorded.reward != found.reward:
        return Difference(
            what=f"reward of {who}", recorded=repr(recorded.reward), found=repr(found.reward)
        )
    own = [part_name(function) for function in config.reward.functions if function != JUDGE]
    names = {**recorded.reward_parts, **found.reward_parts} if whole else own
    for name in names:
        pair = [side.reward_parts.get(name) for side in (recorded, found)]
        if pair[0] != pair[1]:
            return Difference(
                what=f"reward part {name} of {who}", recorded=repr(pair[0]), found=repr(pair[1])
            )
    return None
