"""The episodes of a journal file, scored again with the run's reward functions and compared with
the record.

Some values cannot be repeated and are read back instead: rewards with a judge in them, those of an
environment or a reward model (the reward function reads them in the episode, so the rest of the
reward is repeated), and episodes whose scoring failed, as that may have been a matter of time. It
does not know how a step learns.
"""

from collections.abc import Iterator, Sequence

from tandem.config.schema import Config
from tandem.jobs.engines import build_reward_pool
from tandem.jobs.inputs import read_data
from tandem.rollout.score import with_reward
from tandem.run_folder.diff import Divergence, compare, compare_items
from tandem.runtime.errors import UserError
from tandem.types import Episode, Group

_READ_BACK = {
    "judge": "rewards with a judge's score in them are read back",
    "env": "what the environment gave is read back",
    "reward_model": "the reward model's score is read back",
}


def rescore(
    config: Config, groups: Sequence[Group], step: int
) -> tuple[int, list[str], Divergence | None]:
    """Score all episodes of step `step` again, up to the first whose reward, parts or error differ.

    Returns the number of them, notes on what was read back instead, and the first difference.
    """
    functions = config.reward.functions
    notes = [note for name, note in _READ_BACK.items() if name in functions]
    if "judge" in functions:
        return 0, notes, None
    ended = [e for group in groups for e in group.episodes if e.stop_reason != "paused"]
    episodes = [e for e in ended if not e.reward_error]
    if failed := len(ended) - len(episodes):
        notes.append(f"episodes whose scoring failed are read back: {failed}")
    problems = {problem.uid: problem for problem in read_data(config, "data.train")}
    if missing := [e.uid for e in episodes if e.uid not in problems]:
        raise UserError(
            "a problem of the step is not in the data",
            where="data.train",
            found=f"no {missing[0]}",
            expected="the data that the run began with",
            next="restore it",
        )
    with build_reward_pool(config) as pool:
        scores = [pool.submit(problems[e.uid], e.attempt()) for e in episodes]
        pairs = (
            (e, with_reward(e, score.result(), config.reward, config.rollout.max_new_tokens))
            for e, score in zip(episodes, scores, strict=True)
        )
        divergences = (one for pair in pairs for one in _compare_scores(*pair, step))
        return len(episodes), notes, next(divergences, None)


def _compare_scores(recorded: Episode, computed: Episode, step: int) -> Iterator[Divergence]:
    """Compare an episode's reward and parts."""
    name = f"episode {step}:{recorded.uid}:{recorded.sample_index}"
    if computed.reward_error:
        reward = f"{recorded.reward!r}, without an error"
        yield Divergence(what=f"score of {name}", a=reward, b=computed.reward_error)
    yield from compare(f"reward of {name}", recorded.reward, computed.reward)
    what = f"reward part {{}} of {name}"
    yield from compare_items(recorded.reward_parts, computed.reward_parts, what)
