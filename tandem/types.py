"""The nouns that cross a stage, and the Protocols between stages.

A problem becomes G episodes (a group), each episode a flat training sample, and samples are packed
into microbatches. This file knows numpy and nothing else: no torch, no model, no file format.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray
Message = dict[str, Any]  # texts by name; served chats also hold a list, `tool_calls`
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
    # its row's prompt was messages, not text: TRL's reward functions are told alike
    conversational: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 are off.

    Example: SamplingParams(max_new_tokens=64, temperature=1.0, top_k=0, top_p=1.0, stop=(),
    stop_token_ids=(2,))
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # keep tokens at least this share of the likeliest one's probability
    # divides positive logits of tokens seen before, multiplies negative ones
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0  # also report the likeliest tokens of each position


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to run. Requests with the same prompt share one prefill.

    Example: Request(key=0x9E3779B97F4A7C15, prompt=np.array([5, 9, 2], np.int64),
    params=SamplingParams(...))
    """

    # 64-bit address of its random draws (draws.address); position t draws uniform(key, drawn + t)
    key: int
    prompt: Array  # int64 [T]
    params: SamplingParams
    drawn: int = 0  # tokens sampled under this key before, in earlier turns
    # what was sampled of this very turn before it paused, under whatever weights
    begun: "Completion | None" = None
    # tokens sampled now after which it pauses (stop reason "paused"); 0: never
    max_tokens_now: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine returns for a request, what had begun of it included.

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
    # float32 [T]; what the environment found wrong with the turn a token is of, 0 for nothing
    penalties: Array
    num_prompt_tokens: int  # tokens[:num_prompt_tokens] are equal in all episodes of the group
    # the chat behind the prompt: completions as the assistant's, and what answered them
    messages: tuple[Message, ...]
    stop_reason: EpisodeStop
    key: int = 0  # 64-bit address of its random draws, Request.key of all its turns
    # the chat that the environment began with; empty: the problem's
    opening: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()  # what it showed the model besides
    # what the environment gave: "env", and its parts
    given: dict[str, float] = field(default_factory=dict)
    env_error: str = ""  # how the environment failed
    masked: bool = False  # it failed and carries no loss (env.on_error)
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # why scoring failed, empty when it did not

    @property
    def trainable(self) -> bool:
        """Whether any token of it carries loss."""
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
        return int(np.argmin(np.append(self.loss_mask[::-1], False)))

    def chat(self, problem: Problem) -> tuple[Message, ...]:
        """Return the whole conversation."""
        return (*(self.opening or problem.messages), *self.messages)

    def attempt(self) -> "Attempt":
        """Return what a reward function may see of the episode."""
        return Attempt(
            text=self.text,
            messages=self.messages,
            opening=self.opening,
            stop_reason=self.stop_reason,
            tokens=tuple(self.tokens[self.num_prompt_tokens :].tolist()),
            given=self.given,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G episodes of one problem, and their outcome in the step that sampled them."""

    problem: Problem
    episodes: tuple[Episode, ...]
    outcome: Outcome = "train"

    @property
    def rewards(self) -> Array:
        """float64 [G]; a masked episode counts as an average one of its group, so it moves no
        baseline of a group. (What is divided by the group's size or spread sees a full group: RLOO
        and the std are those of G episodes.)"""
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
        """bool [G]: which episodes are not masked."""
        return np.array([not episode.masked for episode in self.episodes], bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A flat sequence to train on. What a loss needs besides (log-probs, advantages) is a column:
    see train/pack.py.

    Example: tokens [5, 9, 2, 7, 1], loss_mask [0, 0, 0, 1, 1], prefix 3, group 0
    """

    tokens: Array  # int64 [T]
    loss_mask: Array  # bool [T]
    # tokens[:prefix] are equal in all samples of the group, so they are trained once
    prefix: int = 0
    group: int = 0


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


class Ticket(Protocol):
    """A request on its way; `completion` is None until it has ended."""

    completion: Completion | None


class Generate(Protocol):
    """The engine, as environments and publication see it. weight_version: the version of the
    weights it runs now."""

    weight_version: int

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, prompt and completion."""
        ...

    def apply(self, version: int) -> None:
        """The weights in its memory are now those of that version: nothing computed with others is
        used again."""
        ...

    def submit(self, request: Request) -> Ticket:
        """Take a request; what it returns depends on the request and the weights only."""
        ...

    def step(self) -> Sequence[Ticket]:
        """Do some work; returns those that got further, with `completion` set on those that
        ended."""
        ...

    def cancel(self, ticket: Any) -> None:
        """End a request now, with what it has."""
        ...


class RolloutEngine(Generate, Protocol):
    """The engine that samples for training."""

    def logprob_gap(self) -> float:
        """Compare a completion that it has just sampled with the trainer's packed pass over it, by
        the weights that it runs: the largest difference of log-probs in nats; 0 where there is
        none."""
        ...


class Sync(Protocol):
    """Brings the trainer's weights to what generates. An engine runs a version whole, never what is
    between two."""

    def publish(self, version: int) -> None:
        """The trainer's weights are now those of that version."""
        ...

    def sync_to(self, version: int) -> None:
        """The engine of the rollouts runs that version, which was published, from now on. Raises
        UserError if it is gone."""
        ...

    def logprob_gap(self) -> float:
        """RolloutEngine.logprob_gap of the engine of the rollouts."""
        ...


class Renderer(Protocol):
    """Turns chats into tokens; text for a person comes back."""

    stop_token_ids: tuple[int, ...]

    def prompts(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()
    ) -> list[Array]:
        """int64 [T] for each chat: the chat and the header of the assistant's turn."""
        ...

    def turn(self, messages: Sequence[Message]) -> Array:
        """int64 [T]: what follows an assistant's text when these messages answer it: the stop token
        that ends its turn, the messages, and the header of the assistant's next turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How an environment answers a turn of the model.

    Example: Observation(messages=({"role": "user", "content": "higher"},)), and in the end
    Observation(done=True, reward=1.0, parts={"turns": 3.0})
    """

    messages: Sequence[Message] = ()  # what the model reads next; needed unless done
    done: bool = False
    reward: float = 0.0  # added to what the environment gave before
    # reported beside the reward; later ones replace earlier ones
    parts: dict[str, float] = field(default_factory=dict)
    penalty: float = (
        # at least 0: what is wrong with the turn itself; lowers its tokens' advantage
        # (env.penalty_mode)
        0.0
    )


class Env:
    """The world of one episode; an instance is made for each. As it stands: a single turn.

    A subclass overrides what it needs. Its methods may be `async def`, and then wait for others as
    long as they like; plain ones run in a thread of their own, so they may block. Randomness comes
    from the problem: all episodes of a problem must begin alike. What a method raises costs its own
    episode only (env.on_error).
    """

    # JSON schemas that the chat template shows the model, known after reset
    tools: Sequence[Tool] = ()
    # steps leave nothing behind, so an episode that is taken up anew need not repeat them
    stateless: bool = False

    async def reset(self, problem: Problem) -> Sequence[Message]:
        """The chat that the episode starts with."""
        return problem.messages

    async def step(self, text: str) -> Observation:
        """The answer to what the model said."""
        return Observation(done=True)

    async def close(self) -> None:
        """The episode is over, however it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a reward function can know of an episode.

    Example: Attempt(text="Answer: 3", messages=({"role": "assistant", "content": "Answer: 3"},))
    """

    text: str  # the last completion
    messages: tuple[Message, ...] = ()  # the chat behind the prompt, as Episode.messages
    opening: tuple[Message, ...] = ()  # the chat before that, where it is not the problem's
    stop_reason: EpisodeStop = "stop"
    tokens: tuple[int, ...] = ()  # the ids of all tokens behind the prompt
    # Rewards that are known already, by function: "env", and its parts.
    given: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Scores attempts, in the background; never raises for a bad one, but says so in the score's
    error."""

    def submit(self, problem: Problem, attempt: Attempt) -> "Future[Score]":
        """The score, in time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The verdict on one attempt. Example: Score(reward=1.0, parts={"answer": 1.0}, error="")"""

    reward: float
    parts: dict[str, float]
    error: str = ""
