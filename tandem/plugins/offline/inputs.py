"""Inputs of `tandem sft`, `dpo` and `rm`: chats and pairs, as tokens, and held-out problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.data.readers import read_rows, tell_repeats
from tandem.data.renderer import load_renderer
from tandem.jobs.input_hashes import image_hashes
from tandem.jobs.inputs import Count, Inputs, held_out_of, missing, read_data
from tandem.jobs.models import check_models, check_tokenizer
from tandem.model.rope import positions_of
from tandem.plugins.offline.loss_mask import training_samples
from tandem.plugins.offline.rows import parse_chat, parse_preference, template_inputs
from tandem.plugins.offline.supervised import answer_pair, scored_pair
from tandem.runtime.errors import UserError
from tandem.runtime.wording import counted
from tandem.types import Problem, Sample

Pairs = list[list[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInputs(Inputs):
    """Inputs of `tandem sft`."""

    keys: tuple[str, ...] = ("sft.train", "eval.data")
    samples: list[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs(Inputs):
    """Inputs of `tandem dpo` and `tandem rm`."""

    train: Pairs
    test: Pairs  # held out; empty without preference.test


def sft_inputs(config: Config) -> ChatInputs:
    """Read and check the inputs of `tandem sft`."""
    if not config.sft.train:
        raise missing("no chats are named", "sft.train", "a JSONL, CSV or Parquet file of chats")
    rows = read_rows(
        config.sft.train, lambda row: (parse_chat(row), template_inputs(row)), key="sft.train"
    )
    chats, inputs = zip(*rows, strict=True)
    held_out = read_data(config, "eval.data")
    shape = check_models(config)
    renderer = load_renderer(config.model.path, config.data.chat_template)
    check_tokenizer(config, shape, renderer)
    samples = [
        Sample(tokens=t, loss_mask=mask)
        for t, mask in training_samples(renderer, chats, loss=config.sft.loss_on, inputs=inputs)
    ]
    tell_repeats((sample.tokens.tobytes() for sample in samples), "sft.train")
    longest = _check_fit(samples, shape, "a chat", "sft.train, chat")
    mean = _mean_length(samples)
    counts = {"sft.train": Count(number=len(samples), unit="chats", longest=longest, mean=mean)}
    held_out, held_out_count = held_out_of(config, held_out, shape, renderer)
    return ChatInputs(
        shape=shape,
        renderer=renderer,
        samples=samples,
        held_out=held_out,
        counts=counts | held_out_count,
        images=image_hashes([*chats, *(problem.messages for problem in held_out)]),
    )


def dpo_inputs(config: Config) -> PairInputs:
    """Read and check the inputs of `tandem dpo`."""
    return _pair_inputs(config, answer_pair, read_data(config, "eval.data"), "model.reference")


def rm_inputs(config: Config) -> PairInputs:
    """Read and check the inputs of `tandem rm`."""
    inputs = _pair_inputs(config, scored_pair, [])
    tokenizer = inputs.renderer.tokenizer
    if tokenizer.pad_token_id in {
        int(sample.tokens[-2]) for pair in [*inputs.train, *inputs.test] for sample in pair
    }:
        raise UserError(
            "the chat template ends with the padding token, so transformers would read a score "
            "one token early",
            where=f"tokenizer of {config.model.path}",
            found=repr(tokenizer.pad_token),
            expected="a padding token of its own",
            next="name another pad_token in its tokenizer_config.json",
        )
    return inputs


def _pair_inputs(
    config: Config, make: Callable[..., list[Sample]], held_out: Sequence[Problem], *others: str
) -> PairInputs:
    """Read and check pairs, to train on and held out. make: makes the samples of a pair; others:
    further keys that name models."""
    paths = {"preference.train": config.preference.train, "preference.test": config.preference.test}
    if not config.preference.train:
        raise missing(
            "no pairs are named",
            "preference.train",
            "a JSONL, CSV or Parquet file of prompt, chosen, rejected",
        )
    read = {
        key: read_rows(path, lambda row: (parse_preference(row), template_inputs(row)), key=key)
        if path
        else []
        for key, path in paths.items()
    }
    shape = check_models(config, *others, head="value" if make is scored_pair else "tokens")
    renderer = load_renderer(config.model.path, config.data.chat_template)
    check_tokenizer(config, shape, renderer)
    made: list[Pairs] = []
    counts: dict[str, Count] = {}
    for key, rows in read.items():
        chats = [(*pair.prompt, *end) for pair, _ in rows for end in (pair.chosen, pair.rejected)]
        inputs = [inputs for _, inputs in rows for _ in range(2)]
        rendered = training_samples(renderer, chats, loss="last", key=key, inputs=inputs)
        pairs = [rendered[at : at + 2] for at in range(0, len(rendered), 2)]
        # their texts differ in what the template leaves out, as spaces at an end
        equal = [n for n, (a, b) in enumerate(pairs, start=1) if np.array_equal(a[0], b[0])]
        if equal:
            raise UserError(
                f"{key} has {counted(len(equal), 'pairs')} that cannot be used",
                where=f"{key}, pair {equal[0]}",
                found="the same tokens in chosen and rejected, behind the chat template",
                expected="another continuation than chosen",
                next="remove the pair",
            )
        tell_repeats((tuple(tokens.tobytes() for tokens, _ in pair) for pair in pairs), key)
        made.append([make(number, *pair) for number, pair in enumerate(pairs)])
        halves = ([pair[half] for pair in made[-1]] for half in (0, 1))
        longest = max(_check_fit(half, shape, "an answer", f"{key}, pair") for half in halves)
        mean = _mean_length([sample for pair in made[-1] for sample in pair])
        count = Count(number=len(pairs), unit="pairs", longest=longest, mean=mean)
        counts |= {key: count} if pairs else {}
    held_out, held_out_count = held_out_of(config, held_out, shape, renderer)
    return PairInputs(
        keys=(*paths, "eval.data") if make is answer_pair else tuple(paths),
        shape=shape,
        renderer=renderer,
        train=made[0],
        test=made[1],
        held_out=held_out,
        counts=counts | held_out_count,
    )


def _mean_length(samples: Sequence[Sample]) -> float:
    return sum(len(sample.tokens) for sample in samples) / max(1, len(samples))


def _check_fit(samples: Sequence[Sample], shape: Any, what: str, where: str) -> int:
    """Raise UserError for a sample that the model has no positions for; the last token needs none.
    Returns the tokens of the longest."""
    limit = positions_of(shape) + 1
    longest = max(range(len(samples)), key=lambda i: len(samples[i].tokens), default=0)
    size = len(samples[longest].tokens) if samples else 0
    if size > limit:
        raise UserError(
            f"{what} is longer than the model can place",
            where=f"{where} {longest + 1}",
            found=f"{size:,} tokens",
            expected=f"at most {limit:,}",
            next="shorten or drop it",
        )
    return size
