"""An episode as it grows, token by token appended and never changed; and how one that paused is
taken up again.

It knows neither engine nor environment.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from tandem.runtime.errors import InvariantError
from tandem.runtime.rng import address
from tandem.types import Array, Completion, Episode, Group, Observation, Problem


def not_begun(problem: Problem, sample: int, place: tuple[int | str, ...]) -> Episode:
    """An episode that is paused before its first token; place and problem are the address of its
    draws."""
    none = np.zeros(0, np.float32)
    return Episode(
        uid=problem.uid,
        sample_index=sample,
        key=address(*place, problem.uid, sample),
        tokens=none.astype(np.int64),
        loss_mask=none.astype(bool),
        engine_logprobs=none,
        weight_versions=none.astype(np.int32),
        penalties=none,
        num_prompt_tokens=0,
        messages=(),
        stop_reason="paused",
    )


def new_groups(
    problems: Sequence[Problem], group_size: int, place: tuple[int | str, ...]
) -> list[Group]:
    """Groups of episodes that have not begun. Their draws are addressed by (place, row, uid,
    sample), so a problem that occurs twice is sampled anew."""
    return [
        Group(
            problem=problem,
            episodes=tuple(
                not_begun(problem, sample, (*place, row)) for sample in range(group_size)
            ),
        )
        for row, problem in enumerate(problems)
    ]


Part = tuple[Array, Array, Array, Array]  # tokens, log-probs, versions, penalties


class Record:
    """An episode as it grows. parts: what was read and what was said, turn by turn; began: of a
    turn that paused."""

    def __init__(self, episode: Episode):
        self.uid, self.sample, self.key = episode.uid, episode.sample_index, episode.key
        self.messages, self.given = list(episode.messages), dict(episode.given)
        self.opening, self.tools, self.prompt_tokens = (
            episode.opening,
            episode.tools,
            episode.num_prompt_tokens,
        )
        said = len(episode.tokens) - _turn_under_way(episode)
        columns = (
            episode.tokens,
            episode.engine_logprobs,
            episode.weight_versions,
            episode.penalties,
        )
        before, now = (
            [column[part] for column in columns] for part in (slice(said), slice(said, None))
        )
        self.parts: list[Part] = []
        self.length, self.drawn, self._digest = (
            0,
            int(episode.loss_mask[:said].sum()),
            hashlib.blake2b(),
        )
        self._append(*before)
        tokens, logprobs, versions, _ = now
        self.began = (
            Completion(
                tokens=tokens,
                logprobs=logprobs,
                weight_versions=versions,
                text="",
                stop_reason="paused",
            )
            if len(tokens)
            else None
        )

    @property
    def turns(self) -> list[str]:
        """What the model said in the turns that are over."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]

    def read(self, tokens: Array) -> None:
        """Tokens that the model did not sample."""
        none = np.zeros(len(tokens), np.float32)
        self._append(tokens, none, np.full(len(tokens), -1, np.int32), none.copy())

    def say(self, completion: Completion) -> None:
        self._append(
            completion.tokens,
            completion.logprobs,
            completion.weight_versions,
            np.zeros(len(completion.tokens), np.float32),
        )
        self.messages.append({"role": "assistant", "content": completion.text})
        self.drawn += len(completion.tokens)
        self.began = None

    def hear(self, observation: Observation, penalty: float) -> None:
        """What the environment makes of the turn just said."""
        self.messages += observation.messages
        if self.given:
            self.given["env"] += float(observation.reward)
        self.given |= {name: float(value) for name, value in observation.parts.items()}
        self.parts[-1][3][:] = float(observation.penalty) + penalty

    def _append(self, tokens: Array, logprobs: Array, versions: Array, penalties: Array) -> None:
        self.parts.append((tokens, logprobs, versions, penalties))
        self.length += len(tokens)
        self._digest.update(tokens.tobytes())

    def tokens(self) -> Array:
        return np.concatenate([tokens for tokens, *_ in self.parts])

    def episode(self, stop_reason: str, error: str) -> Episode:
        """Raises UserError where a token is no longer what it was when it came."""
        parts = list(self.parts)
        if self.began is not None:
            began = self.began
            parts.append(
                (
                    began.tokens,
                    began.logprobs,
                    began.weight_versions,
                    np.zeros(len(began.tokens), np.float32),
                )
            )
        if self._digest.digest() != hashlib.blake2b(self.tokens().tobytes()).digest():
            raise InvariantError(
                "a token of an episode has changed since it was sampled or read",
                where=f"problem {self.uid}, sample {self.sample}",
                found="other tokens at a turn's end",
                expected="a turn only appends",
                next="report this, with the environment in use",
            )
        tokens, logprobs, versions, penalties = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        return Episode(
            uid=self.uid,
            sample_index=self.sample,
            key=self.key,
            tokens=tokens,
            loss_mask=versions >= 0,
            engine_logprobs=logprobs,
            weight_versions=versions,
            penalties=penalties,
            num_prompt_tokens=self.prompt_tokens,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            opening=self.opening,
            tools=self.tools,
            given=dict(self.given),
            env_error=error,
        )


def _turn_under_way(episode: Episode) -> int:
    """Tokens of the turn in which a paused episode stands."""
    return int(np.argmin(np.append(episode.loss_mask[::-1], False)))
