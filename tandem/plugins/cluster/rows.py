"""Episodes as rows of a data plane: metadata of constant size, and the arrays as bytes.

A process that plans a step from metadata, and fetches the arrays of its own share only, has groups
whose other episodes are placeholders: as long, with as many loss tokens, the same reward and
outcome, and values that are nobody's. Knows no transport.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from safetensors.numpy import save

from tandem.rollout.stream import Place
from tandem.types import Array, Episode, Group, Problem

ARRAYS = ("tokens", "loss_mask", "engine_logprobs", "weight_versions", "penalties")

Tag = dict[str, Any]  # metadata of a row: numbers, short texts and reward parts

_FLOATS = ("engine_logprobs", "penalties")


def key_of(place: Place) -> str:
    """Return the key of a row: "12/3" is episode 3 of group 12."""
    return f"{place[0]}/{place[1]}"


def place_of(key: str) -> Place:
    """Return the place that `key_of` made the key of."""
    group, _, episode = key.partition("/")
    return int(group), int(episode)


def tag_of(group: Group, episode: Episode) -> Tag:
    """Return the metadata of an episode: all that planning, advantages and checks need of one that
    another process trains."""
    sampled = episode.weight_versions[episode.loss_mask]
    used = {name: getattr(episode, name)[episode.loss_mask] for name in _FLOATS}
    return {
        "problem": group.problem.uid,
        "outcome": group.outcome,
        "uid": episode.uid,
        "sample": int(episode.sample_index),
        "stop": episode.stop_reason,
        "masked": bool(episode.masked),
        "reward": float(episode.reward),
        "parts": {name: float(part) for name, part in episode.reward_parts.items()},
        "length": len(episode.tokens),
        "num_prompt": int(episode.num_prompt_tokens),
        "num_loss": len(sampled),
        "prompt": crc32(episode.tokens[: episode.num_prompt_tokens].tobytes()),
        "version": int(sampled.max(initial=-1)),
        "not_finite": [name for name, array in used.items() if not np.isfinite(array).all()],
    }


def places_to_store(groups: Sequence[Group]) -> list[Place]:
    """Return the episodes whose arrays anybody may want: those that carry loss, of groups that are
    trained. The others are a tag."""
    return [
        (row, number)
        for row, group in enumerate(groups)
        if group.outcome == "train"
        for number, episode in enumerate(group.episodes)
        if episode.trainable
    ]


def pack_arrays(episode: Episode) -> bytes:
    """Return the arrays of a row as one value, as what a data plane does for each takes longer than
    the bytes of an episode."""
    return save({name: getattr(episode, name) for name in ARRAYS})


def groups_of(
    tags: Mapping[Place, Tag], arrays: Mapping[Place, Mapping[str, Array]]
) -> list[Group]:
    """Return the groups of a step. tags: of all its episodes; arrays: those that were fetched, by
    name; the rest are placeholders."""
    prompts = {
        (place[0], tags[place]["prompt"]): found["tokens"][: tags[place]["num_prompt"]]
        for place, found in arrays.items()
    }
    members: dict[int, list[Episode]] = {}
    for place in sorted(tags):
        prompt = prompts.get((place[0], tags[place]["prompt"]))
        found = arrays.get(place) or _placeholders(tags[place], prompt)
        members.setdefault(place[0], []).append(_episode(tags[place], found))
    return [
        Group(
            problem=Problem(uid=tags[row, 0]["problem"], messages=(), answer=""),
            episodes=tuple(episodes),
            outcome=tags[row, 0]["outcome"],
        )
        for row, episodes in sorted(members.items())
    ]


def _episode(tag: Tag, arrays: Mapping[str, Any]) -> Episode:
    return Episode(
        uid=tag["uid"],
        sample_index=tag["sample"],
        num_prompt_tokens=tag["num_prompt"],
        messages=(),
        stop_reason=tag["stop"],
        masked=tag["masked"],
        reward=tag["reward"],
        reward_parts=tag["parts"],
        **arrays,
    )


def _placeholders(tag: Tag, prompt: Array | None) -> dict[str, Array]:
    """Return arrays that take up next to no memory and pass for the episode's in every count and
    check. prompt: that of a fetched episode of the group with the same one, so that a mistaken
    prompt is seen."""
    length = tag["length"]
    mask = np.arange(length) >= length - tag["num_loss"]

    def constant(value: float, dtype: type) -> Array:
        return np.ndarray(length, dtype, np.array(value, dtype).tobytes(), strides=(0,))

    tokens = constant(tag["prompt"], np.int64)
    if prompt is not None:
        tokens = np.concatenate([prompt, tokens[len(prompt) :]])
    floats = {n: constant(np.nan if n in tag["not_finite"] else 0.0, np.float32) for n in _FLOATS}
    versions = np.where(mask, tag["version"], -1).astype(np.int32)
    return {"tokens": tokens, "loss_mask": mask, "weight_versions": versions, **floats}
