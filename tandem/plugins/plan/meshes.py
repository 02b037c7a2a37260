"""`tandem plan RECIPE --gpus 64`: the meshes on which a run would be fastest, by arithmetic.

    tandem plan my.toml --gpus 64                 64 H200
    tandem plan my.toml --gpus 512 --gpu h100     others: tandem/plugins/plan/scaling.py

No GPU is needed and no weights are read; where the recipe has data.max_prompt_tokens, prompts are
taken to be so long and no data is read, so that a directory with a config.json is enough.
Formulas, and what they were checked against, are in results/scaling.md; they know neither latencies
nor stragglers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tandem.cli.progress import print_lines, print_table
from tandem.config.parallel import DIMENSIONS, Parallel
from tandem.config.schema import Config
from tandem.jobs.exactness import require_correction
from tandem.jobs.models import check_shape
from tandem.model import custom_code
from tandem.model.config_file import LEAN_ARCHITECTURES
from tandem.model.paths import divisible
from tandem.model.placement import Placement
from tandem.plugins.plan.footprint import Footprint, model_sizes
from tandem.plugins.plan.scaling import ASSUMED, GPUS, MEMORY, Gpu, Times, update_time
from tandem.registry import find
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError

SHOWN = 5
LARGEST = 4096  # GPUs that `smallest` tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on a mesh: bytes of rank 0, in training by name and while it loads its models, and
    seconds of an update."""

    mesh: Parallel
    memory: dict[str, int]
    loading: int
    times: Times

    @property
    def needed(self) -> int:
        return max(self.loading, sum(self.memory.values()))


def why_refused(run: Footprint) -> str:
    """Return why a run could not begin on its mesh, "" if it could."""
    for reason in (*run.mesh.contradictions(), *run.config.contradictions()):
        return reason
    divided = {"model.path": run.sizes.policy, **run.sizes.others}
    divided.pop("reward.model", None)  # it is whole, on rank 0
    for key, model in divided.items():
        try:
            check_shape(run.config, model.shape, key)  # as the run does
        except UserError as error:
            return f"{error.where}: {error.found}, expected {error.expected}"
    return ""


def possible_meshes(run: Footprint, count: int, node: int = 8) -> Iterator[Footprint]:
    """Yield a run on the meshes of so many GPUs on which it could begin. HSDP has the shards of a
    node."""
    for chosen in _factors(count, len(DIMENSIONS)):
        mesh = Parallel(**dict(zip(DIMENSIONS, chosen, strict=True)))
        meshes, shard = [mesh], node // mesh.tensor
        if mesh.expert == 1 and 1 < shard < mesh.replicas and mesh.replicas % shard == 0:
            meshes.append(mesh.model_copy(update={"shard": shard}))
        yield from (on for mesh in meshes if not why_refused(on := run.on(mesh)))


def _factors(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of so many factors with this product."""
    if length == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, length - 1):
                yield (first, *rest)


def plans(run: Footprint, count: int, gpu: Gpu) -> list[Plan]:
    """Return the plans on all possible meshes of so many GPUs that fit, the fastest first."""
    found = [
        Plan(
            mesh=on.mesh,
            memory=on.of_rank_0(),
            loading=on.loading(),
            times=update_time(on.work, on.mesh, gpu),
        )
        for on in possible_meshes(run, count, gpu.node)
    ]
    fitting = [plan for plan in found if plan.needed <= gpu.memory * MEMORY]
    return sorted(fitting, key=lambda plan: (plan.times.total, plan.needed))


def smallest(run: Footprint, gpu: Gpu) -> int | None:
    """Return the smallest power of two of GPUs on which a run fits; None above LARGEST."""
    counts = (1 << power for power in range(LARGEST.bit_length()))
    return next((count for count in counts if plans(run, count, gpu)), None)


# ---------------------------------------------------------------- the command


def plan_gpus(config: Config, command: str, count: int, kind: str) -> None:
    """Print the fastest meshes of so many GPUs for a command that trains."""
    if kind not in GPUS:
        expected = ", ".join(GPUS)
        raise UserError("no numbers of this GPU", where="--gpu", found=kind, expected=expected)
    if not 1 <= count <= LARGEST:
        expected = f"1 to {LARGEST}"
        raise UserError("not a number of GPUs", where="--gpus", found=str(count), expected=expected)
    find("inputs", command, key="--for")  # raises for a command without a plan
    gpu = GPUS[kind]
    if command in ("train", "distill"):
        require_correction(config)
    custom_code.allow(config.model.trust_remote_code)
    run = _run(config, command)
    if not divisible(run.sizes.policy.shape):
        raise UserError(
            "there is no arithmetic for meshes of this architecture",
            where=f"--gpus, model.path = {config.model.path}",
            found=run.sizes.policy.shape.model_type,
            expected=f"one of {', '.join(LEAN_ARCHITECTURES)}",
            next="leave --gpus out: it runs in one process",
        )
    found, work = plans(run, count, gpu), run.work
    if not found:
        fits = smallest(run, gpu)
        there = f"{human_bytes(int(gpu.memory * MEMORY))} of each GPU"
        raise UserError(
            "the run fits on no mesh of these GPUs",
            where=f"--gpus {count}, {gpu.name}",
            found=f"{run.sizes.policy.count:,} parameters",
            expected=f"at most {there} (assumed: {MEMORY:.0%} of its memory)",
            next=f"smallest number of GPUs that fits: {fits} (of powers of two)"
            if fits
            else f"it fits on no power of two up to {LARGEST}: "
            "train.activation_checkpointing=true, or a smaller train.tokens_per_microbatch",
        )
    print_lines(
        [
            f"{count} x {gpu.name}: {gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.memory / 1e9:,.0f} GB, "
            f"NVLink {gpu.nvlink / 1e9:,.0f} GB/s, network {gpu.network / 1e9:,.0f} GB/s "
            f"({gpu.source})",
            f"assumed: {ASSUMED}",
            f"{config.model.path}: {run.sizes.policy.count:,} parameters; {work.updates} x "
            f"{work.clusters * work.cluster:,} tokens a step, all as long as the longest",
        ]
    )
    _print_meshes(found, work.updates, config.parallel)
    best = found[0]
    rows = ", ".join(f"{name} {human_bytes(size)}" for name, size in best.memory.items() if size)
    rows += f"; {human_bytes(best.loading)} while it loads the models"
    print_lines([f"memory of the first mesh, on rank 0: {rows}"])
    if run.sizes.others:
        print_lines([f"not in the times: passes of {', '.join(run.sizes.others)}"])


def _run(config: Config, command: str) -> Footprint:
    """Return a run as it would be on a GPU. Models and data are read as by one process on this
    machine's CPU, as neither depends on the machine."""
    model = config.model.model_copy(update={"device": "cpu", "dtype": "float32"})
    train = config.train.model_copy(update={"backend": "tandem"})
    changes = {"model": model, "train": train, "parallel": Parallel()}
    here = config.model_copy(update=changes)
    sizes = model_sizes(here, command)
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    sizes = replace(
        sizes,
        place=Placement(torch.device("cuda"), dtype),
        policy=replace(sizes.policy, saved_in_base=0),
        others={key: replace(other, saved_in_base=0) for key, other in sizes.others.items()},
    )
    longest = config.data.max_prompt_tokens
    if not (
        command in ("train", "distill") and "max_prompt_tokens" in config.data.model_fields_set
    ):
        counts = find("inputs", command, key="--for")(here).counts
        longest = next(n.longest for key, n in counts.items() if key.endswith(".train"))
    return Footprint(sizes=sizes, config=config, command=command, longest=longest)


def _print_meshes(found: list[Plan], updates: int, of_recipe: Parallel) -> None:
    """Print the fastest meshes, and that of the recipe if it has several processes."""
    own = [plan for plan in found if plan.mesh.mesh == of_recipe.mesh]
    shown = found[:SHOWN] + [plan for plan in own if plan not in found[:SHOWN]]
    print_table(
        ["mesh", "seconds", "messages", "bubble", "memory", "bound by"],
        [
            [
                _name(plan.mesh) + " *" * (plan in own and of_recipe.processes > 1),
                f"{updates * plan.times.total:.3g}",
                f"{plan.times.communication:.0%}",
                f"{plan.times.bubble / plan.times.total:.0%}",
                human_bytes(plan.needed),
                plan.times.bound,
            ]
            for plan in shown
        ],
        title=f"updates of a step: the fastest of {len(found)} meshes that fit",
    )
    if settings := [f"parallel.{size}" for size in found[0].mesh.mesh.split()]:
        print_lines([f"the first one: {' '.join(settings)}"])
    if of_recipe.processes > 1:
        stands = "is *" if own else f"is not among them: {_name(of_recipe)}"
        print_lines([f"the recipe's mesh {stands}"])


def _name(mesh: Parallel) -> str:
    return mesh.mesh.replace(" ", " x ").replace("=", " ") or "one GPU"
