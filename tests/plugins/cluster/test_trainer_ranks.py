"""The trainer's ranks on the nodes of a Ray cluster: the bits of ranks of one machine, whoever is
killed."""

import itertools
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest

from tandem.run_folder.status import read_status
from tandem.runtime.errors import UserError
from tests.support.command import tandem
from tests.support.gated import DEADLINE_S, gated, until, until_gone
from tests.support.runs import fingerprint, run

END_S = 30.0  # for a lost rank to be named, and all to end
MESH = ["parallel.data=2", "run.threads=1", "run.save_every=1"]


@pytest.fixture
def start():
    """start(command, folder): a run in a process of its own, its output beside the folder."""
    processes = []

    def start(command, folder):
        with (folder.parent / f"{folder.name}.out").open("a") as out:
            processes.append(
                subprocess.Popen(
                    [*command, f"run.folder={folder}"], stdout=out, stderr=subprocess.STDOUT
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def output(folder):
    return (folder.parent / f"{folder.name}.out").read_text()


def rank(folder, number):
    rows = {row["role"]: row for row in read_status(folder)["processes"]}
    return rows[f"trainer rank {number}"]


@contextmanager
def no_room(nodes, but=""):
    """All nodes but one without a free CPU."""
    from tandem.plugins.cluster.ray_cluster import join_cluster, ray

    with join_cluster(nodes.address, 2):
        held = [
            ray.util.placement_group([{"CPU": node["Resources"]["CPU"], f"node:{name}": 0.001}])
            for node in ray.nodes()
            if node["Alive"] and (name := node["NodeManagerAddress"]) != but
        ]
        assert all(group.wait(60) for group in held)
        yield


def test_ranks_on_nodes_have_the_bits_of_local_ones_also_after_a_killed_rank_and_node(
    nodes, inputs, start
):
    folder, command = inputs
    command, local, placed = [*command, *MESH], folder / "local", folder / "placed"
    run(command, local)
    joined = [f"cluster.address={nodes.address}", "cluster.nodes=2", "cluster.trainers=ray"]
    home, other = nodes.address.rpartition(":")[0], nodes.add().node_ip_address
    on_ray = [*command, *joined]
    with gated(placed) as allow:
        first = start(on_ray, placed)
        allow(2)
        assert rank(placed, 0)["node"] == rank(placed, 1)["node"] == home
        code, shown, _ = tandem("status", placed, cwd=folder)
        assert code == 0 and "runs: pid" in shown and "trainer rank 1" in shown
        os.kill(rank(placed, 1)["pid"], signal.SIGKILL)
        assert first.wait(END_S) == 3, output(placed)
        assert f"on {home}) was killed" in output(placed)
        assert "trainer_rank_1.log" in output(placed)

        with no_room(nodes, but=other):
            second = start(on_ray, placed)
            allow(4)
        assert f"no room for all ranks on the driver's node {home}" in output(placed)
        lost = rank(placed, 1)
        assert lost["node"] == other
        nodes.remove(other)
        until_gone(lost["pid"])
        assert second.wait(END_S) == 3, output(placed)
        assert f"rank 1 (pid {lost['pid']} on {other})" in output(placed)
    assert start(on_ray, placed).wait(DEADLINE_S) == 0, output(placed)
    assert output(placed).count("resumed from step_") == 2
    assert fingerprint(placed) == fingerprint(local)
    log = (placed / "workers" / "trainer_rank_1.log").read_text()
    assert log.count(f"--- a process on {home}") == 2 and log.count(f"process on {other}") == 1


def test_workers_are_packed_on_the_drivers_node_or_pinned_to_named_ones(nodes):
    from tandem.plugins.cluster.ray_cluster import NODE_CPUS, join_cluster, ray

    with join_cluster(nodes.address, 2) as cluster:
        home = cluster.address_of(cluster.home)
        [other] = set(cluster.nodes().values()) - {home}
        numbers = itertools.count()

        def placed(placement, count):
            cluster.place(placement)
            hosts = [cluster.spawn(next(numbers)) for _ in range(count)]
            until(lambda: all(host.connect() for host in hosts))
            found = [host.node for host in hosts]
            for host in hosts:
                host.end()
            return found

        assert placed("pack", 2) == [home, home]
        assert placed([other], 2) == [other, other]
        assert sorted(placed([home, other], 2)) == [home, other]
        bundle = {"CPU": NODE_CPUS, f"node:{home}": 0.001}
        assert ray.util.placement_group([bundle]).wait(60)
        assert placed("pack", 1) == [other]
        with pytest.raises(UserError) as caught:
            cluster.place([other, "far"])
        assert "cluster.placement" in str(caught.value) and "far" in str(caught.value)
        assert home in str(caught.value) and other in str(caught.value)
