"""Steps of a tiny model whose groups go through a stream, by one process or by those of a mesh."""

from dataclasses import replace

import numpy as np
import torch
from safetensors.numpy import load

from tandem.config.schema import Config
from tandem.plugins.cluster.rows import groups_of, pack_arrays, places_to_store, tag_of
from tandem.rollout.collect import RolloutBatch
from tandem.rollout.stream import MemoryStream
from tandem.step import learn_step
from tandem.trainer.batch import Models
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.trainer.ranks import ALONE
from tests.support.episodes import changed, learn_stage, perturbed, sampled_groups, settings
from tests.support.tiny import exact_model
from tests.support.updates import learner_of
from tests.support.waiting import WAIT_S

PROMPTS, SIZE = 6, 3
STEPS = (1, 2)


def tags_of(groups):
    return {
        (row, n): tag_of(group, episode)
        for row, group in enumerate(groups)
        for n, episode in enumerate(group.episodes)
    }


class RowStream:
    """A data plane within the process: rows by (group, episode), and what was fetched of them."""

    def __init__(self):
        self.steps, self.fetched = {}, []

    def put(self, step, groups):
        rows = {at: pack_arrays(groups[at[0]].episodes[at[1]]) for at in places_to_store(groups)}
        self.steps[step] = tags_of(groups), rows
        return []

    def take(self, step, kept, plan):
        tags, rows = self.steps[step]
        places = sorted(plan(groups_of(tags, {})))
        self.fetched += places
        return groups_of(tags, {at: load(rows[at]) for at in places})

    def clear(self, step):
        del self.steps[step]


def groups_to_learn():
    """Groups of several turns; one turn is penalized, one episode is masked, one group has no
    signal, some episodes began under older weights, and log-probs are a little off, so that
    corrections have something to do."""
    groups = sampled_groups(exact_model("qwen3"), prompts=PROMPTS, size=SIZE, turns=2, version=1)
    for row in (4, 5):
        for number, one in enumerate(groups[row].episodes):
            begun = one.loss_mask & (np.cumsum(one.loss_mask) <= one.loss_mask.sum() // 2)
            versions = np.where(begun, np.int32(0), one.weight_versions)
            groups = changed(groups, (row, number), weight_versions=versions)
    episode = groups[1].episodes[0]
    penalties = np.where(episode.loss_mask, np.float32(0.5), np.float32(0))
    groups = changed(perturbed(groups, 0.05), (1, 0), penalties=penalties)
    groups = changed(groups, (3, 1), masked=True)
    return [groups[0], replace(groups[2], outcome="no_signal"), *groups[1:]]


def config_of(engine="tandem", **rl):
    config = settings(**{"prompts_per_step": PROMPTS, "group_size": SIZE, **rl})
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"engine": engine})}
    )


def learn_through(stream, groups, config: Config, ranks=ALONE, *, puts=True, wait=lambda: None):
    """(rows, weights of the whole model) after STEPS, on the same groups."""
    model = ranks.divide(exact_model("qwen3"), torch.float32)
    stage, rows = learn_stage(Models(policy=learner_of(model, ranks)), config, exact=False), []
    for step in STEPS:
        kept = stream.put(step, groups) if puts else []
        wait()
        taken = stream.take(step, kept, stage.plan_share)
        batch = RolloutBatch(
            step=step, groups=taken, num_carried=len(groups), baseline=0.0, state={}
        )
        rows.append(learn_step(stage, batch))
        if puts:
            stream.clear(step)
    whole = exact_model("qwen3", seed=1) if ranks.rank == 0 else None
    if ranks is ALONE:
        return rows, weights_of(model)
    ranks.publish(model, whole)
    return rows, None if whole is None else weights_of(whole)


def weights_of(model):
    return {name: weight.numpy().tobytes() for name, weight in model.named_weights().items()}


def through_memory_on(mesh, changes):
    return learn_through(
        MemoryStream(), groups_to_learn(), config_of(**changes), ParallelRanks(mesh)
    )


def through_rows_on(mesh, changes):
    """learn_through, and the rows that this rank fetched."""
    stream = RowStream()
    found = learn_through(stream, groups_to_learn(), config_of(**changes), ParallelRanks(mesh))
    return *found, stream.fetched


def through_queue_on(mesh, servers, changes):
    from tandem.plugins.cluster.transfer_queue import TransferQueueStream

    ranks = ParallelRanks(mesh)
    own = {"name": f"rank {mesh.rank}", "capacity": 1, "timeout_s": WAIT_S}
    stream = TransferQueueStream(servers, wait_for_all=ranks.wait_for_all, **own)
    turns = {"puts": mesh.rank == 0, "wait": ranks.wait_for_all}
    found = learn_through(stream, groups_to_learn(), config_of(**changes), ranks, **turns)
    stream.close()
    return found
