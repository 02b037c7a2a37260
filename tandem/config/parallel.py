"""Section [parallel]: the trainer's processes and what each dimension of their mesh divides."""

from collections.abc import Iterator
from math import prod

from pydantic import Field

from tandem.config.section import Section

DIMENSIONS = ("pipeline", "data", "expert", "context", "tensor")  # outermost first


class Parallel(Section):
    """The processes that train one model together; their number is the product of the five sizes.

    With all sizes at 1 there is one process, and nothing below is imported.
    """

    data: int = Field(
        1, ge=1, description="microbatches: processes that train different ones (FSDP2)"
    )
    tensor: int = Field(1, ge=1, description="heads and inner features of a layer")
    context: int = Field(1, ge=1, description="tokens of a microbatch (Ulysses)")
    pipeline: int = Field(1, ge=1, description="layers, in stages (1F1B)")
    expert: int = Field(
        1, ge=1, description="experts; these processes train different microbatches"
    )
    shard: int = Field(
        0,
        ge=0,
        description="processes that hold one copy of weights and optimizer state together (HSDP); "
        "0: all of data, expert and context (FSDP)",
    )
    timeout_s: float = Field(
        20.0,
        gt=0,
        description="seconds without a sign of life of a process after which the run names it and "
        "stops",
    )

    @property
    def processes(self) -> int:
        return prod(getattr(self, name) for name in DIMENSIONS)

    @property
    def replicas(self) -> int:
        """Processes with equal non-expert weights, but for what tensor and pipeline divide."""
        return self.data * self.expert * self.context

    @property
    def mesh(self) -> str:
        """Name the mesh: "" for one process, else e.g. "data=2 tensor=2"."""
        sizes = {name: getattr(self, name) for name in (*DIMENSIONS, "shard")}
        if self.processes == 1:
            return ""
        return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    def contradictions(self) -> Iterator[str]:
        if self.shard and self.replicas % self.shard:
            yield (
                f"parallel.shard: {self.shard} does not divide the {self.replicas} processes of "
                "data x expert x context"
            )
