"""Packages of others that a run needs, refused before anything starts if they are missing."""

import sys

import pytest
import torch

from tandem.choices import choices, machine_of
from tandem.config.schema import Cluster, Config, Rollout, Stream, Weights
from tandem.runtime.errors import UserError

WORKERS = Rollout(workers=1)


def check(config):
    for choice in choices(config):
        choice.check(config)


@pytest.mark.parametrize(
    ("sections", "missing", "where", "extra"),
    [
        ({"stream": Stream(kind="transfer_queue")}, "ray", "stream.kind", "transfer-queue"),
        (
            {"stream": Stream(kind="transfer_queue")},
            "transfer_queue",
            "stream.kind",
            "transfer-queue",
        ),
        ({"weights": Weights(transport="rdma"), "rollout": WORKERS}, "nixl", "weights.", "rdma"),
        ({"cluster": Cluster(nodes=1), "rollout": WORKERS}, "ray", "cluster.nodes", "ray"),
    ],
)
def test_a_missing_package_is_named_by_its_key(sections, missing, where, extra, monkeypatch):
    for package in ("ray", "transfer_queue", "nixl"):
        monkeypatch.setitem(sys.modules, package, None if package == missing else sys)
    with pytest.raises(UserError) as caught:
        check(Config(**sections))
    assert caught.value.where.startswith(where) and f"no {missing}" in caught.value.found
    assert f"pip install 'tandem-rl[{extra}]'" in caught.value.next


def test_vllm_is_not_told_to_sleep_on_a_cpu():
    rollout = Rollout(engine="vllm", workers=1, release_cache=True)
    with pytest.raises(UserError, match="does not sleep on a CPU"):
        check(Config(rollout=rollout, model={"device": "cpu"}))


def test_workers_have_the_gpus_of_the_ranks_or_the_one_that_ray_shows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    here = machine_of(Config())
    assert here.worker_devices("cuda:3", 1) == ["cuda:3"]
    assert here.worker_devices("cuda:0", 2) == ["cuda:0", "cuda:1"]
    assert here.worker_devices("cuda:0", 8) == [f"cuda:{number}" for number in range(4)]
    assert here.worker_devices("cpu", 2) == ["cpu"]
    ray = machine_of(Config(cluster=Cluster(nodes=1), rollout=WORKERS))
    assert (ray.worker_devices("cuda:3", 2), ray.worker_devices("cpu", 2)) == (["cuda"], ["cpu"])
