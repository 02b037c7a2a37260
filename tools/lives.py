"""Random lives of an engine for P1: what is asked, when, of which engine, and what happens to the
weights meanwhile.

`run` plays a Schedule and checks, bit for bit: every token's log-prob is the policy's under the
weights that made it; a request whose tokens come from one version has the tokens it gets alone;
nothing is left in the cache.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from tandem.engine.engine import Engine
from tandem.engine.page_cache import PageCache
from tandem.model.forward import batch_logprobs
from tandem.runtime.rng import address
from tandem.trainer.pack import join, pack
from tandem.types import Completion, Request, Sample, SamplingParams
from tests.support.parity import CONFIGS, VOCABULARY, random_model, words

LIVES = (
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=9, stop_token_ids=(5, 6, 7, 8, 9, 10)),
    SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.8, top_logprobs=3),
    SamplingParams(max_new_tokens=12, temperature=1.3, top_k=10, stop=("9 9",)),
    SamplingParams(max_new_tokens=15, temperature=0.9, min_p=0.05),
    SamplingParams(max_new_tokens=8, temperature=0.0, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.3, top_k=40, top_p=0.95, min_p=0.01),
)
VERSIONS = 4
PROMPTS = [
    np.random.default_rng(n).integers(0, VOCABULARY, size).astype(np.int64)
    for n, size in enumerate((1, 7, 40, 127, 128, 129, 200, 300))
]


@dataclass(frozen=True)
class Ask:
    """A group of samples of one prompt; `common` of its tokens are prompt 7's, so that prompts
    share beginnings."""

    prompt: int
    common: int
    samples: int
    life: int


@dataclass(frozen=True)
class Continue:
    """A conversation grows: all tokens of an ended request and a few of the world's, as a new
    prompt."""

    which: int
    words: int
    life: int


@dataclass(frozen=True)
class Step:
    passes: int


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Update:
    """Give the engine the next weights; the old ones finish what runs."""


@dataclass(frozen=True)
class Schedule:
    """pages: the cache's size; the other sizes are the engine's arguments."""

    model: str
    pages: int
    max_batch: int
    chunk_tokens: int
    acts: list


def schedules():
    ask = st.builds(
        Ask,
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 300),
        st.integers(1, 4),
        st.integers(0, len(LIVES) - 1),
    )
    other = st.one_of(
        st.builds(
            Continue, st.integers(0, 20), st.integers(1, 150), st.integers(0, len(LIVES) - 1)
        ),
        st.builds(Step, st.integers(1, 12)),
        st.builds(Cancel, st.integers(0, 20)),
        st.builds(Update),
    )
    acts = st.lists(st.one_of(ask, other), min_size=1, max_size=14).map(
        lambda acts: [Ask(2, 30, 2, 2), *acts]
    )
    return st.builds(
        Schedule,
        st.sampled_from(sorted(CONFIGS)),
        st.integers(5, 16),
        st.integers(1, 8),
        st.sampled_from([1, 5, 64, 200, 2048]),
        acts,
    )


@cache
def model_with_versions(name):
    """The model and its weights of every version."""
    model, noise = random_model(name), torch.Generator().manual_seed(1)
    first = {key: value.clone() for key, value in model.named_weights().items()}
    versions = [first]
    for _ in range(VERSIONS - 1):
        versions.append(
            {k: v + 0.05 * torch.randn(v.shape, generator=noise) for k, v in versions[-1].items()}
        )
    return model, versions


class EngineDriver:
    """Plays the acts on an engine and remembers who asked for what; `seen` counts what happened, as
    proof that it did."""

    def __init__(self, schedule: Schedule):
        self.model, self.weights = model_with_versions(schedule.model)
        self.model.load_weights(self.weights[0])
        size = PageCache(self.model, 1 << 24).page_bytes
        self.engine = Engine(
            self.model,
            words,
            cache_bytes=schedule.pages * size,
            max_batch=schedule.max_batch,
            chunk_tokens=schedule.chunk_tokens,
        )
        self.asked, self.seen = [], Counter()

    def play(self, act):
        match act:
            case Ask():
                tokens = PROMPTS[act.prompt].copy()
                tokens[: act.common] = PROMPTS[7][: min(act.common, len(tokens))]
                for _ in range(act.samples):
                    self.submit(tokens, act.life)
            case Continue():
                if ended := [r for r in self.asked if r.completion is not None]:
                    last = ended[act.which % len(ended)]
                    more = (
                        np.random.default_rng(act.words)
                        .integers(0, VOCABULARY, act.words)
                        .astype(np.int64)
                    )
                    self.submit(np.concatenate([last.all_tokens(), more]), act.life)
            case Step():
                for _ in range(act.passes):
                    self.engine.step()
            case Cancel():
                if self.asked:
                    self.engine.cancel(self.asked[act.which % len(self.asked)])
            case Update():
                if self.engine.weight_version + 1 < VERSIONS:
                    version = self.engine.weight_version + 1
                    begun = [r for r in self.asked if r.tokens and r.completion is None]
                    self.seen["updates under running requests"] += bool(begun)
                    self.engine.apply(
                        version, lambda: self.model.load_weights(self.weights[version])
                    )

    def submit(self, tokens, life):
        if len(tokens) + LIVES[life].max_new_tokens <= 5 * 128:
            key = address("schedule", len(self.asked))
            self.asked.append(
                self.engine.submit(Request(key=key, prompt=tokens, params=LIVES[life]))
            )

    def finish(self):
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert all(r.completion is not None for r in self.asked), "a request is stuck"
        stats = self.engine.stats()
        assert stats["pages_in_use"] == stats["running"] == stats["waiting"] == 0, stats
        self.seen["preemptions, those for new weights included"] += stats["preemptions"]
        self.seen["prompt tokens found in the cache"] += stats["prompt_tokens_cached"]
        self.seen["cancelled"] += sum(r.completion.stop_reason == "cancelled" for r in self.asked)


def run(schedule: Schedule) -> tuple[float, int, Counter]:
    """(largest gap between engine and policy, sampled tokens, what happened); asserts the rest."""
    driver = EngineDriver(schedule)
    for act in schedule.acts:
        driver.play(act)
    driver.finish()
    pairs = [(r.request, r.completion) for r in driver.asked if r.completion.tokens.size]
    gap = max((gap_under(driver, version, pairs) for version in range(VERSIONS)), default=0.0)
    same_alone(driver, pairs)
    driver.model.load_weights(driver.weights[0])
    return gap, sum(len(c.tokens) for _, c in pairs), driver.seen


def gap_under(driver: EngineDriver, version: int, pairs: list[tuple[Request, Completion]]) -> float:
    """max |engine - policy| over the tokens that this version made; other tokens are their
    context."""
    mine = [(r, c) for r, c in pairs if (c.weight_versions == version).any()]
    if not mine:
        return 0.0
    driver.model.load_weights(driver.weights[version])
    gaps = []
    for life in {r.params for r, _ in mine}:
        lived = [(r, c) for r, c in mine if r.params == life]
        batches = pack([sample_of(r, c, version) for r, c in lived], 2000)
        columns = [c.logprobs[c.weight_versions == version] for _, c in lived]
        for batch, engine in zip(batches, join(batches, columns), strict=True):
            logprobs, _ = batch_logprobs(driver.model, batch, life)
            gaps.append(np.abs(logprobs.detach().numpy() - engine).max())
    return float(np.max(gaps))  # a NaN must show


def sample_of(request: Request, completion: Completion, version: int) -> Sample:
    prompt = np.zeros(len(request.prompt), bool)
    return Sample(
        tokens=np.concatenate([request.prompt, completion.tokens]),
        loss_mask=np.concatenate([prompt, completion.weight_versions == version]),
    )


def same_alone(driver: EngineDriver, pairs: list[tuple[Request, Completion]]) -> None:
    """A large engine that runs one request at a time gives the same tokens, log-probs and
    alternatives."""
    for version in range(VERSIONS):
        mine = [(r, c) for r, c in pairs if (c.weight_versions == version).all()][:4]
        if not mine:
            continue
        driver.model.load_weights(driver.weights[version])
        for request, completion in mine:
            alone = Engine(driver.model, words, cache_bytes=1 << 24, max_batch=1)
            [other] = alone.generate([request])
            size = len(completion.tokens)  # a cancelled one has the beginning
            assert size == len(other.tokens) or completion.stop_reason == "cancelled"
            for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
                assert np.array_equal(getattr(other, name)[:size], getattr(completion, name)), name
