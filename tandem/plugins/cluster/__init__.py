"""Runs on more than one machine, or in more places of one: Ray, TransferQueue, NIXL, gloo, NCCL.

For anyone who has a Ray cluster, or wants to know on one machine what a cluster does to a run. No
bit of a run depends on any of it. docs/guide/cluster.md has the recipes, and what has not run.

    job.py, ray_cluster.py       cluster.nodes: hosts of workers on the nodes
    trainer_ranks.py             cluster.trainers = ray: ranks of [parallel] on the nodes
    node_pool.py, node_worker.py cluster.reward_workers, cluster.env_workers: calls on the nodes
    stream.py, transfer_queue.py stream.kind = transfer_queue: a step's episodes to all ranks
    transports.py                weights.transport: ray, collective, rdma, cuda_ipc
    logs.py                      what workers and ranks print, in the run folder

It plugs in as machines, streams and transports of tandem/registry.py. Extras: `ray`,
`transfer-queue`, `rdma`.
"""
