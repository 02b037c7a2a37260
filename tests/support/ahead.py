"""Rollouts ahead of the training: an engine whose text tells its version, syncs that publish
numbers only, and runs of several steps with them."""

import threading
from contextlib import closing
from dataclasses import replace

from tandem.run_folder.episode_files import read_episodes
from tandem.step_async import RolloutPrefetcher, train_step_async
from tests.support.stages import AddressedEngine, KeyReward, config, stages_in, with_runner

STEPS = 6


class VersionedEngine(AddressedEngine):
    """Also the text, and with it the reward, depends on the version."""

    def number_of(self, request):
        return request.key + self.weight_version


class SlowSync:
    """Publishes numbers only, and syncs to those that have been published; the engine is another
    one than the trainer's."""

    def __init__(self, engine, published=None):
        self.engine, self.synced = engine, []
        self.published = [] if published is None else published

    def publish(self, version):
        self.published.append(version)

    def sync_to(self, version):
        assert version in self.published
        self.synced.append((version, threading.current_thread().name))
        self.engine.apply(version)

    def stats(self):
        return {"sync_bytes": 0}


def stages_ahead(folder, staleness, workers, engine=None, reward=None, **changes):
    """Stages with a scripted engine, beside a trainer whose weights are numbers to it."""
    settings = config(rollout__staleness=staleness, rollout__workers=workers, **changes)
    engine = engine or VersionedEngine()
    stages = stages_in(folder, settings, engine=engine, reward=reward or KeyReward())
    return replace(stages, sync=SlowSync(engine))


def lanes_of(stages, engines):
    """The stages of lanes: one for each engine, with a sync of its own."""
    return [
        replace(with_runner(stages, engine=engine), sync=SlowSync(engine, stages.sync.published))
        for engine in engines
    ]


def trained(stages, lanes=(), steps=STEPS, saves=True):
    """The metrics of a run of that many steps. saves: each waits for what its checkpoint needs."""
    rows = []
    with closing(RolloutPrefetcher(stages, steps, lanes=lanes)) as prefetcher:
        stages.sync.publish(0)
        prefetcher.start(0)
        for step in range(steps):
            rows.append(train_step_async(prefetcher, step).metrics)
            if saves:
                prefetcher.wait_until_durable(step + 1)
    return rows


def ran(folder, staleness, workers, **changes):
    """Stages after STEPS steps, with the metrics; the rollouts' engine is scripted, in a thread
    where workers is 1."""
    stages = stages_ahead(folder, staleness, workers, **changes)
    return stages, trained(stages)


def versions(folder, step):
    """The versions that sampled the tokens of a step, counted from 0."""
    return {
        int(version)
        for episode in read_episodes(folder / f"train_step_{step + 1:06d}.parquet")
        for version in episode.weight_versions[episode.loss_mask]
    }


def journal_of(folder):
    """The bytes of the journal's files, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}
