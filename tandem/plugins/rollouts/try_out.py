"""`tandem try`: a reward function or an environment on a few rows, before a training step is spent
on it.

    tandem try my_reward.py:score --data FILE --answer "Answer: 7"     score an answer
    tandem try my_env.py:Shop --data FILE                              type the turns of the model
    tandem try my_env.py:Shop --data FILE --model DIR                  let a model play

As in training, rollout/episodes.py plays the episodes and reward workers score them.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.cli.progress import console, print_lines
from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.jobs.engines import build_runner, load_engine, open_envs_and_rewards, prepare_process
from tandem.jobs.inputs import read_data
from tandem.model.config_file import check_model
from tandem.registry import names
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.score import generate_and_score, sampling_params
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import message_text
from tandem.runtime.timer import Timer
from tandem.runtime.wording import counted
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


def overrides_of(name: str) -> list[str]:
    """Return the config overrides for the first argument: env.name for a class or a built-in
    environment, else the reward."""
    is_env = name in names("envs") or name.rpartition(":")[2][:1].isupper()
    if is_env and name != "single_turn":
        return [f"env.name={name}", "reward.function=env"]
    return [f"reward.function={name}"]


def try_out(config: Config, answers: Sequence[str], rows: int) -> int:
    """Play and score the first rows of data.train, with model.path if there is one, else with typed
    answers.

    Returns the number of rows that failed in their environment or their reward function.
    """
    prepare_process(config)
    problems = read_data(config, "data.train")[:rows]
    with open_envs_and_rewards(config) as (envs, rewards):
        engine, renderer, sampling = _model_or_typist(config, problems, answers)
        runner = build_runner(config, engine, renderer, envs, rewards)
        failed = dict[str, list[str]]()  # the problems of each error
        for number, problem in enumerate(problems):
            start = time.perf_counter()
            [group] = generate_and_score(
                runner,
                new_groups([problem], 1, (config.run.seed, "try", number)),
                sampling=sampling,
                shaping=config.reward,
                timer=Timer(),
            )
            [episode] = group.episodes
            error = episode.env_error or episode.reward_error
            if error:
                failed.setdefault(error, []).append(problem.uid)
            if error not in failed or len(failed[error]) == 1:
                print_episode(group, time.perf_counter() - start, renderer)
    for first, *others in failed.values():
        print_lines([f"the same error as of {first}: {', '.join(others)}"] * bool(others))
    return sum(map(len, failed.values()))


def _model_or_typist(
    config: Config, problems: Sequence[Problem], answers: Sequence[str]
) -> tuple[Generate, Renderer, SamplingParams]:
    """Take `answers`; without any load the model that model.path names, or else have them typed."""
    if answers or not config.model.path:
        return Typist(answers), PlainRenderer(), SamplingParams(max_new_tokens=1 << 20)
    check_model(config.model.path)
    renderer = load_renderer(config.model.path, config.data.chat_template)
    longest = max(map(len, renderer.prompts([problem.messages for problem in problems])))
    engine = load_engine(config, renderer, longest, console.print)
    return engine, renderer, sampling_params(config.rollout, renderer)


def print_episode(group: Group, seconds: float, renderer: Renderer) -> None:
    """Print an episode: the conversation, the reward and its parts, how it ended, and the time."""
    [episode] = group.episodes
    console.rule(group.problem.uid)
    print_lines(f"{m['role']}: {message_text(m)}" for m in episode.chat(group.problem))
    # an env reward of 0 says nothing
    given = {name: value for name, value in episode.env_rewards.items() if value or name != "env"}
    parts = {**given, **episode.reward_parts}
    text = f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""
    console.print(f"reward {episode.reward:g}{text}", markup=False, style="bold")
    print_lines(f"{name}: {remark}" for name, remark in _remarks(group.problem, episode, renderer))
    end = f"{counted(episode.num_turns, 'turns')}, ended by {episode.stop_reason}, {seconds:.2f} s"
    print_lines([end])


def _remarks(problem: Problem, episode: Episode, renderer: Renderer) -> Iterator[tuple[str, str]]:
    if episode.reward_error:
        yield "not scored", episode.reward_error
    if episode.env_error:
        yield "the environment failed", episode.env_error
    if episode.penalties.any():
        count = int((episode.penalties > 0).sum())
        yield "penalty", f"{episode.penalties.max():g} on {count} tokens"
    if isinstance(renderer, ChatRenderer) and episode.starts:
        yield "rollout.history", "template: each turn had the prompt that the chat template writes"
    elif isinstance(renderer, ChatRenderer) and episode.num_turns > 1:
        yield "rollout.history", "keep: each turn went on from the tokens before it"
        difference = renderer.difference(episode.chat(problem), episode.tokens, episode.tools)
        if difference:
            yield "the chat template would write this conversation differently", difference


# You are the model
# ------------------------------------------------------------------------------


@dataclass(eq=False)
class Typed:
    request: Request
    completion: Completion | None = None


class Typist:
    """An engine whose completions are typed, or given. Implements types.Generate; tokens are code
    points."""

    weight_version, longest = 0, 1 << 24

    def __init__(self, answers: Sequence[str]):
        self._given, self._answers = answers, iter(answers)
        self._waiting: list[Typed] = []
        self._shown = 0  # tokens of the episode under way that were printed

    def apply(self, version: int) -> None:
        self.weight_version = version

    def submit(self, request: Request) -> Typed:
        self._waiting.append(Typed(request))
        return self._waiting[-1]

    def cancel(self, ticket: Any) -> None:
        pass

    def step(self) -> list[Typed]:
        waiting, self._waiting = self._waiting, []
        for typed in waiting:
            typed.completion = self._answer(typed.request)
        return waiting

    def logprob_gap(self) -> float:
        return 0.0

    def _answer(self, request: Request) -> Completion:
        if self._given and not request.num_sampled:
            self._answers = iter(self._given)  # the same for every row
        shown = self._shown if request.num_sampled else 0
        if not self._given:  # else there is nobody to ask
            asked = "".join(map(chr, request.prompt[shown:].tolist()))
            console.print(asked.strip("\n\0"), markup=False)
        try:
            text = next(self._answers) if self._given else input("assistant> ")
        except (StopIteration, EOFError):
            raise UserError(
                "there are no more answers",
                found="the end of what was typed or given; in a pipe, nobody types",
                expected="one for each turn",
                next="add --answer TEXT, once for each turn, or --model DIR",
            ) from None
        self._shown = len(request.prompt) + len(text) + 1
        tokens = np.array([*map(ord, text), END], np.int64)
        return Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            weight_versions=np.zeros(len(tokens), np.int32),
            text=text,
            stop_reason="stop",
        )


class PlainRenderer:
    """Chats as plain text. Implements types.Renderer; tokens are code points."""

    stop_token_ids: tuple[int, ...] = (END,)
    vocabulary = 0

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        return [np.array([*map(ord, _plain(chat, tools))], np.int64) for chat in chats]

    def turn(self, messages: Sequence[Message]) -> Array:
        return np.array([END, *map(ord, _plain(messages, ()))], np.int64)


def _plain(chat: Sequence[Message], tools: Sequence[Tool]) -> str:
    shown = [
        f"tool {tool['function']['name']}: {tool['function'].get('description', '')}"
        for tool in tools
    ]
    shown += [f"{message['role']}: {message_text(message)}" for message in chat]
    return "\n".join(["", *shown, ""])
