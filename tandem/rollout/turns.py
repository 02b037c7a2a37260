"""One episode's turns: prompt, completion, the environment's answer, until an end or a pause.

A coroutine, which waits for its environment and for what it asks the engine; who runs it, and in
which thread, is episodes.py's. Sampled tokens are never trained as others: a turn only appends, or
begins behind a prompt of its own (rollout.history = "template"). An episode depends on its address,
the weights and its environment, never on other episodes or their order.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.envs.calls import Caller, EnvironmentFailed, close_env, make_env
from tandem.envs.observations import check_observation, check_opening, malformed_thinking
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import EpisodeBuilder
from tandem.runtime.errors import InvariantError, UserError
from tandem.types import (
    Array,
    Completion,
    Env,
    Episode,
    EpisodeStop,
    Group,
    Renderer,
    Request,
    SamplingParams,
)

Ask = Callable[[Request], Awaitable[Completion]]  # has the engine answer a request


@dataclass
class Turns:
    """Runs episodes of these groups, turn by turn.

    max_tokens: of a sequence, prompt included; token_budget: tokens that an episode samples before
    it pauses; 0: run to the end; ask: set by who runs them.
    """

    groups: Sequence[Group]
    renderer: Renderer
    envs: EnvPool
    sampling: SamplingParams
    max_tokens: int
    token_budget: int
    ask: Ask = field(init=False)
    _prompts: dict[str, Array] = field(default_factory=dict)  # rendered chats
    _first_prompts: dict[int, Array] = field(default_factory=dict)  # by row

    async def run(self, row: int, builder: EpisodeBuilder) -> Episode:
        """Run the episode of a group to its end or its next pause, in an environment of its own."""
        stop_reason: EpisodeStop = "error"
        error = ""
        fresh = None, self.envs.caller(self.envs.limits.timeout_s)
        env, caller = self.envs.paused.pop(builder.key, fresh)
        try:
            if env is None:
                env = make_env(self.envs.make)
                chat = await caller.call(env.reset, self.groups[row].problem)
                if not builder.length:
                    self._begin(row, builder, chat, env)
                elif not env.stateless:  # brought to where it stands; its earlier answers count
                    for text in builder.turns:
                        await caller.call(env.step, text)
            stop_reason = await self._run_turns(env, builder, caller)
        except TimeoutError:
            stop_reason = "time"
            error = f"the environment took more than {self.envs.limits.timeout_s} s (env.timeout_s)"
        except EnvironmentFailed as failure:
            error = str(failure)
        finally:  # also when the rollout is cancelled
            if env is not None and stop_reason == "paused":
                self.envs.paused[builder.key] = (env, caller)
            elif env is not None:
                await close_env(env, caller)
        failed = stop_reason in ("error", "time")
        return builder.build(
            stop_reason, error, masked=failed and self.envs.limits.on_error == "mask"
        )

    def _begin(self, row: int, builder: EpisodeBuilder, chat: Any, env: Env) -> None:
        check_opening(chat)
        if type(env) is not Env:  # a single turn gives no reward
            builder.env_rewards["env"] = 0.0
            builder.opening, builder.tools = tuple(chat), tuple(env.tools)
        key = repr((chat, env.tools))
        if key not in self._prompts:
            with _template_errors():
                self._prompts[key] = self.renderer.prompts([chat], env.tools)[0]
            if env.tools:
                from tandem.data.own_calls import warn_of_unread_calls

                warn_of_unread_calls(self.renderer)  # type: ignore[arg-type]  # it is hashable
        prompt = self._prompts[key]
        if len(prompt) >= self.max_tokens:
            limit = f"an episode has at most {self.max_tokens:,} (env.max_tokens, or the engine's)"
            raise EnvironmentFailed(f"a prompt of {len(prompt):,} tokens, where {limit}")
        if not np.array_equal(prompt, self._first_prompts.setdefault(row, prompt)):
            raise UserError(
                "the episodes of a problem begin differently",
                where=f"reset of env.name = {self.envs.limits.name}",
                found=f"two different prompts for problem {builder.uid!r}",
                expected="one: advantages compare episodes that began alike",
                next="take randomness from the problem (its uid or metadata), not from a generator",
            )
        builder.num_prompt_tokens = len(prompt)
        builder.append_prompt_tokens(prompt)

    async def _run_turns(self, env: Env, builder: EpisodeBuilder, caller: Caller) -> EpisodeStop:
        """Run turns to the end or the next pause; return the stop reason. Raises EnvironmentFailed,
        and TimeoutError past env.timeout_s."""
        sampling, budget = self.sampling, self.token_budget
        for turn in range(len(builder.turns) + 1, self.envs.limits.max_turns + 1):
            if self.token_budget and not budget:
                return "paused"
            room = min(sampling.max_new_tokens, self.max_tokens - builder.length)
            resumed = builder.unfinished_turn
            request = Request(
                key=builder.key,
                prompt=builder.tokens(),
                params=replace(sampling, max_new_tokens=room),
                num_sampled=builder.num_sampled,
                resume_from=resumed,
                max_tokens_now=budget,
            )
            completion = await self.ask(request)
            if resumed:
                _require_same_beginning(completion, resumed, builder.uid)
            budget -= len(completion.tokens) - (len(resumed.tokens) if resumed else 0)
            if completion.stop_reason == "paused":
                builder.unfinished_turn = completion
                return "paused"
            builder.append_completion(completion)
            if completion.stop_reason != "stop":
                return "length" if room == sampling.max_new_tokens else "tokens"
            observation = check_observation(await caller.call(env.step, completion.text))
            cost = self.envs.limits.bad_thinking * malformed_thinking(completion.text)
            builder.apply_observation(observation, cost)
            if observation.done:
                return "stop"
            if turn < self.envs.limits.max_turns and self.envs.renders:
                from tandem.data.chat_template import with_calls_read

                chat = [*builder.opening, *with_calls_read(builder.messages, builder.tools)]
                with _template_errors():
                    [prompt] = self.renderer.prompts([chat], builder.tools)
                if len(prompt) >= self.max_tokens:
                    return "tokens"
                builder.begin_sequence(prompt)
            elif turn < self.envs.limits.max_turns:
                with _template_errors():  # from the end of the turn to the next one's header
                    answer = self.renderer.turn(observation.messages)
                if answer[0] not in self.renderer.stop_token_ids:
                    raise UserError(
                        "a turn of the model would not be ended",
                        where="the chat template",
                        found=f"token {answer[0]} behind it",
                        expected=f"one of {self.renderer.stop_token_ids}",
                        next="report this, with the model's chat template",
                    )
                if completion.tokens[-1] in self.renderer.stop_token_ids:  # sampled already
                    answer = answer[1:]
                if builder.length + len(answer) >= self.max_tokens:
                    return "tokens"
                builder.append_prompt_tokens(answer)
        return "turns"


def _require_same_beginning(completion: Completion, resumed: Completion, problem: str) -> None:
    if not np.array_equal(completion.tokens[: len(resumed.tokens)], resumed.tokens):
        raise InvariantError(
            "a turn that was paused went on with other tokens",
            where=f"problem {problem}",
            expected="the tokens it had",
            next="report this",
        )


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn the chat template's UserError into EnvironmentFailed: the environment wrote the chat."""
    try:
        yield
    except UserError as error:
        raise EnvironmentFailed(str(error)) from error
