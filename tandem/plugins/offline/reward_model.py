"""The reward model of a run, reward.model: a sequence classifier that scores chats."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.config.schema import Config
from tandem.data.renderer import load_renderer
from tandem.jobs.models import placement
from tandem.model.config_file import check_model
from tandem.model.forward import batch_values
from tandem.model.load import load_model
from tandem.model.stock import check_weights
from tandem.rollout.score import RewardModel
from tandem.runtime.errors import UserError
from tandem.trainer.pack import pack, split
from tandem.types import Array, Episode, Problem, Sample

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


def check_reward_model(path: str) -> None:
    """Check, before any weights are loaded, that reward.model can score chats. Raises UserError."""
    shape = check_model(path, "reward.model", head="value")
    if not (shape.architectures or [""])[0].endswith("ForSequenceClassification"):
        raise UserError(
            "this model has no head that scores",
            where=f"reward.model = {path}",
            found=", ".join(shape.architectures or ["no architecture"]),
            expected="a sequence classifier with one label",
            next="tandem rm trains one",
        )
    check_weights(path)
    load_renderer(path)


def load_reward_model(config: Config) -> RewardModel:
    """Load the reward model. It scores each chat up to the last turn of the model, and stores the
    score in `env_rewards`."""
    scorer = load_model(config.reward.model, head="value", place=placement(config))
    renderer = load_renderer(config.reward.model)
    lock = threading.Lock()  # rollouts ahead and an evaluation may ask at once

    def score(
        problems: Sequence[Problem], episodes: Sequence[tuple[Episode, ...]]
    ) -> list[tuple[Episode, ...]]:
        rendered = {}
        for row, group in enumerate(episodes):
            for episode in group:
                if not episode.num_turns:
                    continue
                chat = episode.chat(problems[row])
                end = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
                # a chat that its template refuses has no score, and `reward_model` says so
                with suppress(UserError):
                    [rendered[row, episode.sample_index]] = renderer.chats([chat[: end + 1]])
        with lock:
            values = scores(scorer, list(rendered.values()), config.train.tokens_per_microbatch)
        by_key = dict(zip(rendered, values, strict=True))

        def with_score(row: int, episode: Episode) -> Episode:
            if (score := by_key.get((row, episode.sample_index))) is None:
                return episode
            return replace(episode, env_rewards={**episode.env_rewards, "reward_model": score})

        return [
            tuple(with_score(row, episode) for episode in group)
            for row, group in enumerate(episodes)
        ]

    return score


@torch.no_grad()
def scores(scorer: "ExactModel", chats: Sequence[Array], tokens_per_microbatch: int) -> list[float]:
    """Return a reward model's score of each chat, tokens int64 [T]."""
    samples = [Sample(tokens=tokens, loss_mask=np.zeros(len(tokens), bool)) for tokens in chats]
    batches = pack([read_at_end(sample) for sample in samples], tokens_per_microbatch)
    by_chat = split(batches, [batch_values(scorer, batch).numpy() for batch in batches])
    return [float(by_chat[number][0]) for number in range(len(chats))]


def read_at_end(sample: Sample) -> Sample:
    """Append a token that is never read, as a target at the last place."""
    tokens = np.append(sample.tokens, 0)
    return replace(sample, tokens=tokens, loss_mask=np.arange(len(tokens)) == len(sample.tokens))
