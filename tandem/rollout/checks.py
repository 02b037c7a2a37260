"""Checks of a step's groups before anything is trained on them, for mistakes that no metric shows.

A mistake found here has touched no weight; the journal has the episodes.
"""

import numpy as np

from tandem.config.schema import Config
from tandem.rollout.collect import Progress, RolloutBatch
from tandem.rollout.episode_metrics import TRUNCATED
from tandem.run_folder.episode_files import episode_file, read_note
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import InvariantError, UserError
from tandem.types import Episode

REPORT = "report this; the journal has the episodes"
UNTOUCHED = "report this; the last checkpoint and the journal are as they were"


def check_groups(batch: RolloutBatch, max_truncated: float) -> None:
    """Raise InvariantError if an episode has another problem or prompt than its group, and
    UserError if more than `max_truncated` of the completions were truncated."""
    for group in batch.trained:
        first = next((e for e in group.episodes if e.trainable), group.episodes[0])
        for number, episode in enumerate(group.episodes):
            is_own = (episode.uid, episode.sample_index) == (group.problem.uid, number)
            compared = episode.trainable and first.trainable
            if not is_own or (compared and not np.array_equal(_prompt(episode), _prompt(first))):
                found = f"sample {episode.sample_index} of {episode.uid}"
                raise InvariantError(
                    "an episode is not of the problem it is trained for",
                    where=f"step {batch.step + 1}",
                    found=f"{found}, with {len(_prompt(episode))} prompt tokens",
                    expected=f"sample {number} of {group.problem.uid}, with the prompt of the "
                    "others",
                    next=REPORT,
                )
    truncated = [e.stop_reason in TRUNCATED for group in batch.fresh for e in group.episodes]
    share = sum(truncated) / max(len(truncated), 1)
    if share > max_truncated:
        raise UserError(
            "too many completions were truncated",
            where=f"step {batch.step + 1}",
            found=f"{share:.0%} of them",
            expected=f"at most {max_truncated:.0%} (rl.max_truncated)",
            next="raise rl.max_truncated and go on, or rollout.max_new_tokens in a new run.folder",
        )


def _prompt(episode: Episode) -> np.ndarray:
    return episode.tokens[: episode.num_prompt_tokens]


def check_batch(batch: RolloutBatch, config: Config) -> None:
    """Raise InvariantError unless the step trains exactly the tokens that its weights sampled."""
    sizes = [len(group.episodes) for group in batch.trained]
    expected = [config.rl.group_size] * config.rl.prompts_per_step
    if sizes != expected:
        raise _wrong_tokens(f"groups of {sizes} episodes, not {expected}", batch.step)
    version = max(0, batch.step - config.rollout.staleness)
    fresh = {id(group) for group in batch.fresh}
    for group in batch.trained:
        # the others may have begun under older weights
        exactly = id(group) in fresh and not config.rollout.token_budget
        for e in group.episodes:
            sampled = e.weight_versions[e.weight_versions >= 0]
            who = f"{e.uid}, sample {e.sample_index}"
            if not np.array_equal(e.loss_mask, e.weight_versions >= 0):
                found = f"loss on {e.loss_mask.sum()} of {len(sampled)} sampled tokens"
                raise _wrong_tokens(f"{who}: {found}", batch.step)
            if (sampled > version).any() or (exactly and (sampled < version).any()):
                found = f"tokens of versions {np.unique(sampled)}, not {version}"
                raise _wrong_tokens(f"{who}: {found}", batch.step)


def check_progress(progress: Progress, journal: Journal, step: int) -> None:
    """Raise InvariantError unless the rollouts go on from the end of those before: a part of the
    data would be skipped or repeated."""
    note = read_note(episode_file(journal.folder, step))
    if note is not None and note["run"] == journal.run and note["state"] != progress.state():
        expected = f"{note['state']['batches']}, and the rest as the journal of step {step} has it"
        raise InvariantError(
            "the rollouts do not go on where they ended",
            where=f"step {step + 1}",
            found=f"{progress.batches} batches of problems drawn before it",
            expected=expected,
            next=UNTOUCHED,
        )


def _wrong_tokens(found: str, step: int) -> InvariantError:
    return InvariantError(
        "a step would train other tokens than its own",
        where=f"step {step + 1}",
        found=found,
        expected="every token that its weights sampled, and no other",
        next=REPORT,
    )
