"""`tandem try`: a reward function or an environment on a few rows, before a training step is spent
on it.

    tandem try my_reward.py:score --data FILE --answer "Answer: 7"     what is typed, or given, is scored
    tandem try my_env.py:Shop --data FILE                              you are the model: type its turns
    tandem try my_env.py:Shop --data FILE --model DIR                  a model plays

It goes the way of training: the same loop plays the episodes (rollout/episodes.py) and the same
workers score them.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.cli.progress import console
from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.envs.load import BUILT_IN
from tandem.jobs.engines import (
    load_engine,
    load_reward_model,
    open_envs_and_rewards,
    prepare_process,
)
from tandem.jobs.inputs import read_data
from tandem.model.load import check_model
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episodes import run_episodes
from tandem.rollout.evaluate import sampling_params
from tandem.rollout.score import RolloutRunner, generate_and_score
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.types import (
    Array,
    Completion,
    Episode,
    Generate,
    Group,
    Message,
    Problem,
    Renderer,
    Request,
    SamplingParams,
    Tool,
)

END = 0  # the token that ends a typed turn; the others are code points


def setting(what: str) -> list[str]:
    """What the first argument stands for: a class, and a built-in of that name, is an environment;
    else a reward."""
    is_env = what in BUILT_IN or what.rpartition(":")[2][:1].isupper()
    return (
        [f"env.name={what}", "reward.function=env"]
        if is_env and what != "single_turn"
        else [f"reward.function={what}"]
    )


def try_out(config: Config, answers: Sequence[str], rows: int) -> int:
    """Play and score the first rows of data.train, with model.path if there is one and else with
    what a person types.

    Returns how many rows failed in their environment or their reward function.
    """
    prepare_process(config)
    problems = read_data(config, "data.train")[:rows]
    with open_envs_and_rewards(config) as (envs, rewards):
        engine, renderer, sampling = _model_or_typist(config, problems, answers)
        runner = RolloutRunner(
            engine=engine,
            renderer=renderer,
            envs=envs,
            rewards=rewards,
            reward_model=load_reward_model(config),
        )
        if config.env.name not in ("single_turn", "agent", "verifiers"):
            _check_openings(runner, problems)
        failed = 0
        for number, problem in enumerate(problems):
            start = time.perf_counter()
            [group] = generate_and_score(
                runner,
                new_groups([problem], 1, (config.run.seed, "try", number)),
                sampling=sampling,
                shaping=config.reward,
                timer=Timer(),
            )
            tell(group, time.perf_counter() - start, renderer)
            failed += any(episode.env_error or episode.reward_error for episode in group.episodes)
    return failed


def _check_openings(runner: RolloutRunner, problems: Sequence[Problem]) -> None:
    """Begin two episodes of each problem and end them. Raises UserError, as training would, where
    they begin differently."""
    groups = new_groups(problems, 2, ("try", "openings"))
    run_episodes(
        groups,
        engine=Mute([]),
        renderer=runner.renderer,
        envs=runner.envs,
        sampling=SamplingParams(max_new_tokens=1),
    )


def _model_or_typist(
    config: Config, problems: Sequence[Problem], answers: Sequence[str]
) -> tuple[Generate, Renderer, SamplingParams]:
    """Return what answers: the model, if model.path names one, else a person or `answers`."""
    if not config.model.path:
        return Typist(answers), PlainRenderer(), SamplingParams(max_new_tokens=1 << 20)
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    engine = load_engine(config, renderer, problems, console.print)
    return engine, renderer, sampling_params(config.rollout, renderer.stop_token_ids)


def tell(group: Group, seconds: float, renderer: Renderer) -> None:
    """One episode: what was said, what it is worth and why, and how long it took."""
    [episode] = group.episodes
    console.rule(group.problem.uid)
    for message in episode.chat(group.problem):
        console.print(f"{message['role']}: {message['content']}", markup=False)
    # 0 says nothing
    given = {name: value for name, value in episode.given.items() if value or name != "env"}
    parts = ", ".join(
        f"{name} {value:g}" for name, value in {**given, **episode.reward_parts}.items()
    )
    console.print(
        f"reward {episode.reward:g}" + f" ({parts})" * bool(parts), markup=False, style="bold"
    )
    for name, text in _remarks(group.problem, episode, renderer):
        console.print(f"{name}: {text}", markup=False)
    console.print(
        f"{episode.num_turns} turn(s), ended by {episode.stop_reason}, {seconds:.2f} s",
        markup=False,
    )


def _remarks(problem: Problem, episode: Episode, renderer: Renderer) -> Iterator[tuple[str, str]]:
    if episode.reward_error:
        yield "not scored", episode.reward_error
    if episode.env_error:
        yield "the environment failed", episode.env_error
    if episode.penalties.any():
        yield (
            "penalty",
            f"{episode.penalties.max():g} on {int((episode.penalties > 0).sum())} tokens",
        )
    if isinstance(renderer, ChatRenderer) and episode.num_turns > 1:
        difference = renderer.difference(episode.chat(problem), episode.tokens, episode.tools)
        if difference:
            yield "the chat template would write this conversation differently", difference


# You are the model
# -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Typed:
    request: Request
    completion: Completion | None = None


class Typist:
    """A person, or given answers, as the engine. Implements types.Generate; tokens are code
    points."""

    weight_version, longest = 0, 1 << 24

    def __init__(self, answers: Sequence[str]):
        self._given, self._answers = answers, _ask()
        self._asked: list[Typed] = []
        self._told = 0  # tokens of the episode under way that were shown

    def apply(self, version: int) -> None:
        self.weight_version = version

    def submit(self, request: Request) -> Typed:
        self._asked.append(Typed(request))
        return self._asked[-1]

    def cancel(self, ticket: Any) -> None:
        pass

    def step(self) -> list[Typed]:
        asked, self._asked = self._asked, []
        for typed in asked:
            typed.completion = self._answer(typed.request)
        return asked

    def _answer(self, request: Request) -> Completion:
        if self._given and not request.drawn:
            self._answers = iter(self._given)  # the same for every row
        shown = self._told if request.drawn else 0
        console.print(_text(request.prompt[shown:]).strip("\n\0"), markup=False)
        text = next(self._answers, None)
        if text is None:
            raise UserError(
                "there are no more answers",
                found="the end of what was typed or given",
                expected="one for each turn",
                next="add --answer TEXT, or --model DIR",
            )
        tokens = np.array([*map(ord, text), END], np.int64)
        self._told = len(request.prompt) + len(tokens)
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            weight_versions=np.zeros(len(tokens), np.int32),
            text=text,
            stop_reason="stop",
        )


class Mute(Typist):
    """An engine whose every completion is cut before its first word, which ends the episode."""

    def _answer(self, request: Request) -> Completion:
        end = np.array([END], np.int64)
        return Completion(
            tokens=end,
            logprobs=np.zeros(1, np.float32),
            weight_versions=np.zeros(1, np.int32),
            text="",
            stop_reason="length",
        )


def _ask() -> Iterator[str]:
    while True:
        try:
            yield input("assistant> ")
        except EOFError:
            return


class PlainRenderer:
    """A chat as a person reads it. Implements types.Renderer; tokens are code points."""

    stop_token_ids: tuple[int, ...] = (END,)

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        return [np.array([*map(ord, _plain(chat, tools))], np.int64) for chat in chats]

    def turn(self, messages: Sequence[Message]) -> Array:
        return np.array([END, *map(ord, _plain(messages, ()))], np.int64)


def _plain(chat: Sequence[Message], tools: Sequence[Tool]) -> str:
    told = [
        f"tool {tool['function']['name']}: {tool['function'].get('description', '')}"
        for tool in tools
    ]
    return "\n".join(
        ["", *told, *(f"{message['role']}: {message['content']}" for message in chat), ""]
    )


def _text(tokens: Array) -> str:
    return "".join(map(chr, tokens.tolist()))
