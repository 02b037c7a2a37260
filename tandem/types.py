"""The nouns that cross rooms, and the Protocols between them.

A problem becomes G episodes (a group), each episode a flat training sample, and samples are packed
into microbatches. This file knows numpy and nothing else: no torch, no model, no file format.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray
Message = dict[str, Any]  # texts by name, or lists: `tool_calls`, content with images
Tool = dict[str, Any]  # a function's JSON schema, as OpenAI and chat templates have it
Row = dict[str, float]  # metrics or timings of a step, by name

CompletionStop = Literal[
    "stop",  # a stop token or a stop string
    "length",  # SamplingParams.max_new_tokens
    "paused",  # Request.max_tokens_now; a later request goes on with it
    "cancelled",
]
EpisodeStop = Literal[
    "stop",  # it came to its end
    "length",  # a turn reached max_new_tokens
    "turns",  # a limit of the environment, as the next two
    "tokens",
    "time",
    "error",  # the environment failed, see Episode.env_error
    "paused",  # it goes on in a later step
]
Outcome = Literal[
    "train",
    "carry",  # a later step trains it
    "no_signal",  # left out by dynamic sampling
    "unfinished",  # some of its episodes are paused
]


# fields of an episode with a value for each token
PER_TOKEN = ("tokens", "loss_mask", "engine_logprobs", "weight_versions", "penalties")


def _no_experts() -> Array:
    return np.zeros((0, 0, 0), np.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One task of a data set.

    Example: Problem(uid="algebra/17", messages=({"role": "user", "content": "Solve 2x = 6."},),
    answer="3", category="linear_nested", metadata={"level": 1})
    """

    uid: str  # unique in its data set; addresses every random draw made for it
    messages: tuple[Message, ...]  # the chat that asks; the last message is the user's
    answer: str  # ground truth, as the reward function wants it
    category: str = ""  # evaluation is also reported by category
    metadata: dict[str, Any] = field(default_factory=dict)
    conversational: bool = True  # prompt of messages, not of text (for TRL's reward functions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDistribution:
    """Distribution that tokens are sampled from: logits after repetition penalty, temperature,
    top-k, top-p and min-p, in this order.

    Temperature 0 is greedy: its log-probs are those at temperature 1 without the filters, which
    would leave one token. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. Example:
    SamplingDistribution(temperature=0.7, top_p=0.9)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # keep tokens at least this share of the likeliest one's probability
    # divides positive logits of tokens seen before, multiplies negative ones
    repetition_penalty: float = 1.0
    # ids from here on have no token and are never sampled: rows that pad a vocabulary; 0: none
    vocabulary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingDistribution):
    """Sampling of one request: the distribution of each token, and the end.

    Example: SamplingParams(max_new_tokens=64, temperature=1.0, stop=(), stop_token_ids=(2,))
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # before them stop tokens have no probability, and stop strings no effect
    top_logprobs: int = 0  # also report the likeliest tokens of each position
    prompt_logprobs: int | None = None  # score the prompt, with so many likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to run. Requests with the same prompt share one prefill.

    Example: Request(key=0x9E3779B97F4A7C15, prompt=np.array([5, 9, 2]), params=SamplingParams(...))
    """

    # 64-bit address of its random draws (rng.address); position t draws uniform(key,
    # num_sampled + t)
    key: int
    prompt: Array  # int64 [T]
    params: SamplingParams
    num_sampled: int = 0  # tokens sampled under this key before, in earlier turns
    # the part of this turn sampled before it paused, by weights of any version
    resume_from: "Completion | None" = None
    max_tokens_now: int = 0  # after so many it pauses (stop reason "paused"); 0: never
    mask: Any = None  # engine.masks.TokenMask: tokens that may be sampled; a request's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The engine's result for a request, Request.resume_from included.

    Example: Completion(tokens=np.array([7, 2]), logprobs=np.array([-0.3, -0.01], np.float32),
    weight_versions=np.array([4, 4], np.int32), text="3", stop_reason="stop")
    """

    tokens: Array  # int64 [N], the stop token included
    logprobs: Array  # float32 [N], nats, of the distribution actually sampled from
    weight_versions: Array  # int32 [N], the weights that produced each token
    text: str  # decoded, without stop token or stop string
    stop_reason: CompletionStop
    # int64 [N, top_logprobs], likeliest first
    top_tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    # float32 [N, top_logprobs], nats
    top_logprobs: Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    # int16 [T + N - 1, layers, k], the experts of all tokens but the last, the prompt's included,
    # by the last token's weights; none without rl.router_replay
    experts: Array = field(default_factory=_no_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at a problem, as one flat token sequence: prompt, completion, observation,
    completion, ...

    Example: a prompt of 3 tokens answered with 2: tokens [5, 9, 2, 7, 1], loss_mask [0, 0, 0, 1,
    1], engine_logprobs [0, 0, 0, -0.3, -0.01], weight_versions [-1, -1, -1, 4, 4]
    """

    uid: str
    sample_index: int  # which of the group's G attempts
    tokens: Array  # int64 [T]
    loss_mask: Array  # bool [T], true where the model sampled the token
    engine_logprobs: Array  # float32 [T], nats; 0 where loss_mask is false
    weight_versions: Array  # int32 [T]; -1 where loss_mask is false
    # float32 [T]; the environment's penalty for the turn of the token, 0 without one
    penalties: Array
    num_prompt_tokens: int  # tokens[:num_prompt_tokens] are equal in all episodes of the group
    messages: tuple[Message, ...]  # the chat behind the prompt: the model's turns and the answers
    stop_reason: EpisodeStop
    key: int = 0  # 64-bit address of its random draws, Request.key of all its turns
    opening: tuple[Message, ...] = ()  # the chat that the environment began with, or ()
    tools: tuple[Tool, ...] = ()  # tools that it showed the model
    env_rewards: dict[str, float] = field(default_factory=dict)  # "env", and its parts
    env_error: str = ""  # how the environment failed
    masked: bool = False  # it failed and carries no loss (env.on_error)
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # why scoring failed, empty if it did not
    experts: Array = field(default_factory=_no_experts)  # int16 [T - 1, layers, k], or none
    # where in `tokens` each turn after the first begins, with its whole prompt
    # (rollout.history = "template"); () if a turn goes on from the one before
    starts: tuple[int, ...] = ()

    @property
    def sequences(self) -> "tuple[Episode, ...]":
        """Sequences to train: itself or, with `starts`, each turn behind its own prompt. The
        num_prompt_tokens of a turn are then those that it has in common with the first prompt."""
        if not self.starts:
            return (self,)
        prompt, found = self.tokens[: self.num_prompt_tokens], []
        for start, end in pairwise((0, *self.starts, len(self.tokens))):
            arrays = {name: getattr(self, name)[start:end] for name in PER_TOKEN}
            read = min(len(prompt), int(arrays["loss_mask"].argmax()))
            common = int(np.cumprod(arrays["tokens"][:read] == prompt[:read]).sum())
            found.append(replace(self, **arrays, starts=(), num_prompt_tokens=common))
        return tuple(one for one in found if one.loss_mask.any())

    @property
    def trainable(self) -> bool:
        """True if any token carries loss."""
        return not self.masked and bool(self.loss_mask.any())

    @property
    def text(self) -> str:
        """The last completion, decoded; empty if there is none."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")

    @property
    def num_turns(self) -> int:
        """Turns of the model."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def last_turn_tokens(self) -> int:
        """Sampled tokens at the end of the sequence: of the last turn, or of one that is paused."""
        return len(self.loss_mask) - 1 - self.loss_mask.tobytes().rfind(b"\0")

    def chat(self, problem: Problem) -> tuple[Message, ...]:
        """Return the whole conversation."""
        return (*(self.opening or problem.messages), *self.messages)

    def attempt(self) -> "Attempt":
        """Return all that a reward function may see of the episode."""
        own = self.loss_mask if self.starts else slice(self.num_prompt_tokens, None)
        return Attempt(
            text=self.text,
            messages=self.messages,
            opening=self.opening,
            stop_reason=self.stop_reason,
            tokens=tuple(self.tokens[own].tolist()),
            env_rewards=self.env_rewards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G episodes of one problem, and their outcome in the step that sampled them."""

    problem: Problem
    episodes: tuple[Episode, ...]
    outcome: Outcome = "train"

    @property
    def rewards(self) -> Array:
        """Rewards of the episodes, float64 [G]. A masked episode gets the mean of the others, so it
        moves no baseline; RLOO and the std still see G episodes."""
        rewards = np.array([episode.reward for episode in self.episodes], np.float64)
        valid = self.valid
        if not valid.all():
            first = rewards[valid][:1]
            rewards[~valid] = (
                float(first[0] + (rewards[valid] - first).mean()) if len(first) else 0.0
            )
        return rewards

    @property
    def valid(self) -> Array:
        """Episodes that are not masked, as bool [G]."""
        return np.array([not episode.masked for episode in self.episodes], bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A flat sequence to train on; further inputs of a loss are in trainer/batch.py.

    Example: tokens [5, 9, 2, 7, 1], loss_mask [0, 0, 0, 1, 1], prefix 3, group 0
    """

    tokens: Array  # int64 [T]
    loss_mask: Array  # bool [T]
    prefix: int = 0  # tokens[:prefix] are equal in all samples of the group, and trained once
    group: int = 0
    experts: Array = field(default_factory=_no_experts)  # int16 [T - 1, layers, k], or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples packed without padding; a prefix shared by samples of a group appears once.

    A segment is a run of rows that see each other causally and, before them, one prefix segment's
    rows. Example: prompt [5, 9, 2] with responses [7, 1] and [8, 1]: tokens [5, 9, 2, 7, 8],
    positions [0, 1, 2, 3, 3], segments [[0, 3, 0, 0], [3, 1, 0, 3], [4, 1, 0, 3]], rows [2, 3, 2,
    4], targets [7, 1, 8, 1], samples [0, 1], sequences [0, 0, 1, 1]
    """

    tokens: Array  # int64 [T]
    positions: Array  # int64 [T], position of the token in its own sequence
    segments: Array  # int64 [S, 4]: first row, rows, first row of the prefix, rows of the prefix
    rows: Array  # int64 [N]: the row whose hidden state predicts targets[n]
    targets: Array  # int64 [N]: the tokens that carry loss
    samples: Array  # int64 [B]: which samples these are, as numbers in the list that was packed
    sequences: Array  # int64 [N]: place in `samples` of the sample that targets[n] is of
    experts: Array = field(default_factory=_no_experts)  # int16 [T, layers, k], or none


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step of training."""

    metrics: Row  # a pure function of the run
    timings: Row  # wall-clock, never compared
    state: dict[str, Any]  # of the Progress after the step, for the checkpoint


class Ticket(Protocol):
    """A request on its way."""

    completion: Completion | None  # None until it has ended


class Generate(Protocol):
    """The engine, as environments and publication see it."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that it runs."""

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, prompt and completion."""

    def apply(self, version: int) -> None:
        """Take the weights in memory as that version; drop cached results of others."""

    def submit(self, request: Request) -> Ticket:
        """Take a request; its completion depends on the request and the weights only."""

    def step(self) -> Sequence[Ticket]:
        """Do some work; return the tickets that got further or ended."""

    def cancel(self, ticket: Any) -> None:
        """End a request now, with the tokens it has."""

    def logprob_gap(self) -> float:
        """Compare a completion just sampled with the trainer's packed pass over it: the largest
        difference of log-probs, nats; 0 without a completion."""


class WeightSync(Protocol):
    """Transport of the trainer's weights to the engines. An engine runs one version at a time."""

    def publish(self, version: int) -> None:
        """Publish the trainer's weights as that version."""

    def sync_to(self, version: int) -> None:
        """Have the engine run a version. Raises UserError if it is gone."""

    def stats(self) -> Row:
        """Return `sync_bytes` and `load_s` of the engine's version, since the last call."""


class ParityCheck(Protocol):
    """Check of a run that the engine samples from the trainer's model (trainer/parity.py)."""

    exact: bool  # the two agree bit for bit here (P1), so any log-prob gap is an error

    def after_rollout(self, engine: Generate, step: int) -> Row:
        """Compare a completion of a step that the engine just sampled; return timings. Raises
        what ends the run."""

    def before_update(self, batch: Any, policy: Any, version: int) -> Row:
        """Compare the tokens of a trainer.batch.TrainBatch that weights `version` sampled with the
        policy, a Learner; return metrics. Raises what ends the run."""


class Renderer(Protocol):
    """Renderer of chats as tokens."""

    stop_token_ids: tuple[int, ...]
    vocabulary: int  # one more than the largest id of a token; 0 if unknown

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        """Return int64 [T] for each chat: the chat, and the header of the assistant's turn."""

    def turn(self, messages: Sequence[Message]) -> Array:
        """Return int64 [T], the tokens that follow an assistant's text: the stop token of its turn,
        the messages that answer it, and the header of its next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's answer to a turn of the model.

    Example: Observation(messages=({"role": "user", "content": "higher"},)), and in the end
    Observation(done=True, reward=1.0, parts={"turns": 3.0})
    """

    messages: Sequence[Message] = ()  # read next by the model; needed unless done
    done: bool = False
    reward: float = 0.0  # added to earlier rewards of the environment
    parts: dict[str, float] = field(default_factory=dict)  # reported; later ones replace earlier
    penalty: float = 0.0  # >= 0, for a flaw of the turn; lowers its advantage (env.penalty_mode)


class Env:
    """The world of one episode; an instance is made for each. As it stands: a single turn.

    A subclass overrides what it needs. Its methods may be `async def`; plain ones run in a thread
    of their own, so they may block. Randomness comes from the problem: all its episodes begin
    alike, and equal turns have equal answers. An error costs its own episode only (env.on_error).
    """

    tools: Sequence[Tool] = ()  # JSON schemas for the chat template, known after reset
    stateless: bool = False  # steps leave nothing behind: a resumed episode need not repeat them

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """Return the chat that the episode starts with."""
        return problem.messages

    async def step(self, text: str) -> Observation:
        """Answer a turn of the model."""
        return Observation(done=True)

    async def close(self) -> None:
        """Release the resources of the episode; called however it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An episode as a reward function sees it.

    Example: Attempt(text="Answer: 3", messages=({"role": "assistant", "content": "Answer: 3"},))
    """

    text: str  # the last completion
    messages: tuple[Message, ...] = ()  # the chat behind the prompt, as Episode.messages
    opening: tuple[Message, ...] = ()  # the chat before that, if it is not the problem's
    stop_reason: EpisodeStop = "stop"
    # the ids of all tokens behind the prompt; of sampled ones, if each turn has its own prompt
    tokens: tuple[int, ...] = ()
    # Rewards that are known already, by function: "env", and its parts.
    env_rewards: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Background scoring of attempts; a failure is in the score's error."""

    def submit(self, problem: Problem, attempt: Attempt) -> "Future[Score]":
        """Return a future of the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward with its parts. Example: Score(reward=1.0, parts={"answer": 1.0}, error="")"""

    reward: float
    parts: dict[str, float]
    error: str = ""
