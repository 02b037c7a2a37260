"""`tandem plan`: could a run start here, and what does it take?

For who asks before he waits: values with their origin, data, memory, disk, and the fastest meshes
of so many GPUs (`--gpus`). results/plan_accuracy.md compares plans with runs, results/scaling.md
the formulas of meshes with published numbers.

    footprint.py    memory and disk of one process or of a mesh, and what a setting saves
    shards.py       the bytes of a rank, and what autograd keeps
    scaling.py, meshes.py   GPUs, communication, time, and which meshes are possible
    command.py, cli.py   the command; origins.py: where each value is from

It plugs in as a command, and as `resources` of tandem/registry.py: a run asks it for advice when
memory is out.
"""
