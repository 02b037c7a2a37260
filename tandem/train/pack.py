"""Samples -> microbatches without padding. Samples of a group share one copy of their prompt's rows.

A prompt is trained once for its group and not once for each sample: exact, because a response attends to the same
keys at the same positions. Knows no model and no loss.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from tandem.types import Microbatch, Sample


def pack(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[Microbatch]:
    """Fill microbatches in order, up to the token budget; a single longer sample gets a microbatch of its own.

    Raises ValueError for a sample without a token after its prefix, or with loss where nothing predicts it.
    """
    for sample in samples:
        start = max(sample.prefix, 1)
        if len(sample.tokens) <= sample.prefix or sample.loss_mask[:start].any():
            raise ValueError(
                f"sample of group {sample.group}: {len(sample.tokens)} tokens, prefix {sample.prefix}, loss before {start}"
            )
    batches, rows = [], 0
    current: list[list[Sample]] = []
    for cluster in _clusters(samples, tokens_per_microbatch):
        needed = _rows(cluster)
        if current and rows + needed > tokens_per_microbatch:
            batches.append(_microbatch(current))
            current, rows = [], 0
        current.append(cluster)
        rows += needed
    return [*batches, _microbatch(current)] if current else batches


def _clusters(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    """Neighbours of one group that share a prefix and fit the budget together."""
    for _, members in groupby(samples, key=lambda s: (s.group, s.prefix)):
        cluster: list[Sample] = []
        for sample in members:
            if cluster and (not sample.prefix or _rows([*cluster, sample]) > budget):
                yield cluster
                cluster = []
            cluster.append(sample)
        yield cluster


def _rows(cluster: list[Sample]) -> int:
    """Input rows: the prefix once, then each sample's own tokens but the last, which nothing follows."""
    prefix = cluster[0].prefix
    return prefix + sum(len(s.tokens) - 1 - prefix for s in cluster)


def _microbatch(clusters: list[list[Sample]]) -> Microbatch:
    tokens, positions, segments, rows, targets, logprobs, advantages = ([] for _ in range(7))  # type: ignore[var-annotated]
    first = 0
    for cluster in clusters:
        prefix, prefix_first = cluster[0].prefix, first
        if prefix:
            tokens.append(cluster[0].tokens[:prefix])
            positions.append(np.arange(prefix))
            segments.append((first, prefix, 0, 0))
            first += prefix
        for sample in cluster:
            own = len(sample.tokens) - 1 - prefix
            if own:
                tokens.append(sample.tokens[prefix:-1])
                positions.append(np.arange(prefix, prefix + own))
                segments.append((first, own, prefix_first, prefix))
            places = np.flatnonzero(sample.loss_mask)
            before = places - 1
            rows.append(np.where(before < prefix, prefix_first + before, first + before - prefix))
            targets.append(sample.tokens[places])
            logprobs.append(sample.engine_logprobs[places])
            advantages.append(sample.advantages[places])
            first += own
    return Microbatch(
        tokens=np.concatenate(tokens), positions=np.concatenate(positions), segments=np.array(segments, np.int64),
        rows=np.concatenate(rows), targets=np.concatenate(targets), engine_logprobs=np.concatenate(logprobs),
        advantages=np.concatenate(advantages),
    )  # fmt: skip
