"""Generation and scoring of episodes: environments, engine and reward workers side by side.

Training, evaluation and `tandem rollout` share it. Knows no step and no weights.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tandem.config.episodes import Reward as RewardConfig
from tandem.config.episodes import Rollout
from tandem.rl.filters import overlong_penalty
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episodes import run_episodes
from tandem.run_folder.journal import Parts
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.types import Episode, Generate, Group, Problem, Renderer, Reward, SamplingParams, Score

# Adds a reward model's score to the `env_rewards` of episodes, those of each problem together.
RewardModel = Callable[
    [Sequence[Problem], Sequence[tuple[Episode, ...]]], list[tuple[Episode, ...]]
]

ScoringKey = tuple[int, int]  # (row of the group, sample of it)


@dataclass(frozen=True, kw_only=True)
class RolloutRunner:
    """The parts that generate and score episodes.

    after_generation: called when no request of `generate_and_score` is to come any more.
    """

    engine: Generate
    renderer: Renderer
    envs: EnvPool
    rewards: Reward
    reward_model: RewardModel | None
    after_generation: Callable[[], None] = lambda: None


def sampling_params(rollout: Rollout, renderer: Renderer) -> SamplingParams:
    """Return how the config samples."""
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop=tuple(rollout.stop),
        stop_token_ids=renderer.stop_token_ids,
        vocabulary=renderer.vocabulary,
    )


def generate_and_score(
    runner: RolloutRunner,
    groups: Sequence[Group],
    *,
    sampling: SamplingParams,
    shaping: RewardConfig,
    timer: Timer,
    token_budget: int = 0,
    parts: Parts | None = None,
) -> list[Group]:
    """Generate the paused episodes of the groups, score those that end, and return the groups.

    An episode is scored while others are still generated. If scoring fails, the episode keeps the
    reward 0 and the error. token_budget: tokens after which an episode pauses again; 0: never.
    parts: keeps the scored episodes on disk; episodes that it already holds are not generated
    again. Raises UserError if every episode fails, in its environment or in scoring.
    """
    # those that an earlier start of the run has seen end
    recalled = {} if parts is None else parts.ended
    groups = [
        replace(group, episodes=tuple(recalled.get(e.key, e) for e in group.episodes))
        for group in groups
    ]
    scoring = _Scoring(runner.rewards, groups, shaping, sampling.max_new_tokens, parts)
    ended = [list[Episode]() for _ in groups]

    def keep(row: int, episode: Episode) -> None:  # for the reward model
        ended[row].append(episode)

    with timer("rollout_s"):
        generated = run_episodes(
            groups,
            engine=runner.engine,
            renderer=runner.renderer,
            envs=runner.envs,
            sampling=sampling,
            on_end=keep if runner.reward_model else scoring.submit,
            token_budget=token_budget,
        )
    runner.after_generation()
    env_name = f"env.name = {runner.envs.limits.name}"
    errors = [e.env_error for episodes in generated for e in episodes]
    _require_some_success(errors, "every episode failed in its environment", where=env_name)
    with timer("reward_s"):
        if runner.reward_model is not None:
            problems = [group.problem for group in groups]
            ordered = [tuple(sorted(e, key=lambda e: e.sample_index)) for e in ended]
            for row, episodes in enumerate(runner.reward_model(problems, ordered)):
                for episode in episodes:
                    scoring.submit(row, episode)
        scored = scoring.results(generated)
    errors = [e.reward_error for group in scored for e in group.episodes]
    functions = f"reward.function = {', '.join(shaping.functions)}"
    _require_some_success(errors, "no episode could be scored", where=functions)
    return scored


@dataclass(frozen=True, eq=False)
class _Scoring:
    """Scores of one call of generate_and_score, on their way."""

    rewards: Reward
    groups: Sequence[Group]
    shaping: RewardConfig
    max_new_tokens: int
    parts: Parts | None
    futures: dict[ScoringKey, Future[Episode]] = field(default_factory=dict)

    def submit(self, row: int, episode: Episode) -> None:
        """Have an episode scored in the background; called from any thread."""
        scored: Future[Episode] = Future()

        def finish(score: Future[Score]) -> None:
            try:
                rewarded = with_reward(episode, score.result(), self.shaping, self.max_new_tokens)
                if self.parts is not None:
                    self.parts.add(row, rewarded)
                scored.set_result(rewarded)
            except Exception as error:  # raised again by `results`
                scored.set_exception(error)

        self.futures[row, episode.sample_index] = scored
        self.rewards.submit(self.groups[row].problem, episode.attempt()).add_done_callback(finish)

    def results(self, generated: Sequence[tuple[Episode, ...]]) -> list[Group]:
        """Wait for the scores; return the groups. Episodes not scored now stay as they were."""
        with watchdog.waiting_for("rewards", "the last scores"):
            scored = {key: future.result() for key, future in self.futures.items()}
        return [
            replace(
                group, episodes=tuple(scored.get((row, e.sample_index), e) for e in generated[row])
            )
            for row, group in enumerate(self.groups)
        ]


def _require_some_success(errors: Sequence[str], what: str, where: str) -> None:
    """Raise UserError if there are several episodes and all have an error: a single failure costs
    one episode, but these would cost the run."""
    if len(errors) > 1 and all(errors):
        raise UserError(
            what,
            where=where,
            found=errors[0],
            expected="at least one episode without an error",
            next="`tandem try` runs one problem; after a change of your code add --fresh to the "
            "command; after any other repair the same command resumes",
        )


def with_reward(
    episode: Episode, score: Score, shaping: RewardConfig, max_new_tokens: int
) -> Episode:
    """Return the episode with its reward less the overlong penalty; 0 if its environment failed."""
    if episode.env_error:
        return replace(episode, reward=0.0)
    reward, parts = score.reward, dict(score.parts)
    truncated = episode.stop_reason == "length"
    length = max_new_tokens if truncated else episode.last_turn_tokens
    excess = truncated or overlong_penalty(length, max_new_tokens, shaping.overlong_buffer)
    if cost := shaping.overlong_penalty * excess:
        reward, parts["overlong"] = reward - cost, -cost
    return replace(episode, reward=reward, reward_parts=parts, reward_error=score.error)
