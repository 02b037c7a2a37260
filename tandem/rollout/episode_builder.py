"""Episodes as they grow: tokens are appended and never changed; a paused episode is taken up again.

Knows neither engine nor environment.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from tandem.runtime.errors import InvariantError
from tandem.runtime.rng import address
from tandem.types import Array, Completion, Episode, EpisodeStop, Group, Observation, Problem


def new_groups(
    problems: Sequence[Problem], group_size: int, place: tuple[int | str, ...]
) -> list[Group]:
    """Make groups of episodes that have not begun.

    Their draws are addressed by (place, row, uid, sample), so a problem that occurs twice is
    sampled anew.
    """
    return [
        Group(
            problem=problem,
            episodes=tuple(
                new_episode(problem, sample, (*place, row)) for sample in range(group_size)
            ),
        )
        for row, problem in enumerate(problems)
    ]


def new_episode(problem: Problem, sample: int, place: tuple[int | str, ...]) -> Episode:
    """Make an episode paused before its first token; (place, problem, sample) address its draws."""
    empty = np.zeros(0, np.float32)
    return Episode(
        uid=problem.uid,
        sample_index=sample,
        key=address(*place, problem.uid, sample),
        tokens=empty.astype(np.int64),
        loss_mask=empty.astype(bool),
        engine_logprobs=empty,
        weight_versions=empty.astype(np.int32),
        penalties=empty,
        num_prompt_tokens=0,
        messages=(),
        stop_reason="paused",
    )


class EpisodeBuilder:
    """An episode under way: spans (tokens, log-probs, weight versions, penalties), turn by turn."""

    def __init__(self, episode: Episode):
        """Take up a paused episode. The tokens of its last turn, if it paused within one, become
        `unfinished_turn`."""
        self.uid, self.sample, self.key = episode.uid, episode.sample_index, episode.key
        self.messages, self.env_rewards = list(episode.messages), dict(episode.env_rewards)
        self.opening, self.tools = episode.opening, episode.tools
        self.num_prompt_tokens, self.experts = episode.num_prompt_tokens, episode.experts
        self.starts, self._digest = list(episode.starts), hashlib.blake2b()
        self.length = -sum(self.starts[-1:])  # tokens of the sequence that goes on
        self._spans: list[tuple[Array, Array, Array, Array]] = []
        done = len(episode.tokens) - episode.last_turn_tokens
        self.num_sampled = int(episode.loss_mask[:done].sum())
        spans = episode.tokens, episode.engine_logprobs, episode.weight_versions, episode.penalties
        self._append(*(array[:done] for array in spans))
        self.unfinished_turn: Completion | None = None
        if episode.last_turn_tokens:
            self.unfinished_turn = Completion(
                tokens=episode.tokens[done:],
                logprobs=episode.engine_logprobs[done:],
                weight_versions=episode.weight_versions[done:],
                text="",
                stop_reason="paused",
                experts=episode.experts,
            )

    @property
    def turns(self) -> list[str]:
        """Texts of the model's turns so far."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]

    def tokens(self) -> Array:
        """Return the tokens that the next turn goes on from, int64 [T]."""
        tokens = np.concatenate([tokens for tokens, *_ in self._spans])
        return tokens[len(tokens) - self.length :]

    def begin_sequence(self, prompt: Array) -> None:
        """Begin the next turn with a prompt of its own, int64 [T]."""
        self.starts.append(sum(self.starts[-1:]) + self.length)
        self.length = 0
        self.append_prompt_tokens(prompt)

    def append_prompt_tokens(self, tokens: Array) -> None:
        """Append tokens that the model did not sample."""
        zeros = np.zeros(len(tokens), np.float32)
        self._append(tokens, zeros, np.full(len(tokens), -1, np.int32), zeros.copy())

    def append_completion(self, completion: Completion) -> None:
        """Append a turn of the model."""
        self._append(*_span(completion))
        self.messages.append({"role": "assistant", "content": completion.text})
        self.num_sampled += len(completion.tokens)
        self.experts = completion.experts  # of the whole sequence
        self.unfinished_turn = None

    def apply_observation(self, observation: Observation, penalty: float) -> None:
        """Add the environment's answer to the last turn. penalty: further cost of that turn."""
        self.messages += observation.messages
        if self.env_rewards:
            self.env_rewards["env"] += float(observation.reward)
        self.env_rewards |= {name: float(value) for name, value in observation.parts.items()}
        *_, penalties = self._spans[-1]
        penalties[:] = float(observation.penalty) + penalty

    def build(self, stop_reason: EpisodeStop, error: str, *, masked: bool = False) -> Episode:
        """Return the episode. Raises InvariantError if a token has changed since it was
        appended."""
        so_far = np.concatenate([tokens for tokens, *_ in self._spans])
        if self._digest.digest() != hashlib.blake2b(so_far.tobytes()).digest():
            raise InvariantError(
                "a token of an episode has changed since it was sampled or read",
                where=f"problem {self.uid}, sample {self.sample}",
                found="other tokens at a turn's end",
                expected="a turn only appends",
                next="report this, with the environment in use",
            )
        spans = list(self._spans)
        if self.unfinished_turn is not None:
            spans.append(_span(self.unfinished_turn))
        tokens, logprobs, versions, penalties = map(np.concatenate, zip(*spans, strict=True))
        return Episode(
            uid=self.uid,
            sample_index=self.sample,
            key=self.key,
            tokens=tokens,
            loss_mask=versions >= 0,
            engine_logprobs=logprobs,
            weight_versions=versions,
            penalties=penalties,
            num_prompt_tokens=self.num_prompt_tokens,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            opening=self.opening,
            tools=self.tools,
            env_rewards=dict(self.env_rewards),
            env_error=error,
            masked=masked,
            experts=(self.unfinished_turn or self).experts,
            starts=tuple(self.starts),
        )

    def _append(self, tokens: Array, logprobs: Array, versions: Array, penalties: Array) -> None:
        self._spans.append((tokens, logprobs, versions, penalties))
        self.length += len(tokens)
        self._digest.update(tokens.tobytes())


def _span(turn: Completion) -> tuple[Array, Array, Array, Array]:
    no_penalty = np.zeros(len(turn.tokens), np.float32)
    return turn.tokens, turn.logprobs, turn.weight_versions, no_penalty
