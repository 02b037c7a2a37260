"""GPUs by their vendor's numbers, and the shares of them that a plan assumes. No measurement."""

from dataclasses import dataclass

GB, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU in a node of eight. Rates are of one GPU and in one direction."""

    name: str
    flops: float  # FLOP/s of dense products in bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory
    nvlink: float  # bytes/s to the others of its node
    network: float  # bytes/s to other nodes
    source: str
    node: int = 8  # GPUs of a node


# Data sheets give products with sparsity, twice those of dense matrices, and NVLink both ways,
# twice one way. Networks are those of the vendor's own systems, one adapter a GPU.
GPUS = {
    "a100": Gpu(
        name="A100 80GB SXM",
        flops=312 * TERA,
        memory=80 * GB,
        bandwidth=2039 * GB,
        nvlink=300 * GB,
        network=25 * GB,
        source="NVIDIA A100 data sheet; DGX A100: 8 x 200 Gb/s",
    ),
    "h100": Gpu(
        name="H100 SXM",
        flops=989 * TERA,
        memory=80 * GB,
        bandwidth=3350 * GB,
        nvlink=450 * GB,
        network=50 * GB,
        source="NVIDIA H100 data sheet; DGX H100: 8 x 400 Gb/s",
    ),
    "h200": Gpu(
        name="H200 SXM",
        flops=989 * TERA,
        memory=141 * GB,
        bandwidth=4800 * GB,
        nvlink=450 * GB,
        network=50 * GB,
        source="NVIDIA H200 data sheet; DGX H200: 8 x 400 Gb/s",
    ),
    "b200": Gpu(
        name="B200 SXM",
        flops=2250 * TERA,
        memory=180 * GB,
        bandwidth=8000 * GB,
        nvlink=900 * GB,
        network=50 * GB,
        source="NVIDIA DGX B200 data sheet, an eighth of it; 8 x 400 Gb/s",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Shares of the vendor's numbers that a plan counts on."""

    products: float = 0.4  # of the FLOP/s, in training
    links: float = 0.8  # of NVLink and network
    decode: float = 0.6  # of the memory's bandwidth, in decode; of the FLOP/s, in prefill
    memory: float = 0.9  # of the GPU's memory; the rest is for passing tensors and fragments

    def __str__(self) -> str:
        return (
            f"{self.products:.0%} of peak FLOP/s in training, {self.links:.0%} of the links, "
            f"{self.decode:.0%} of bandwidth in decode, {self.memory:.0%} of memory; no latencies, "
            "work evenly divided, gathers of weights behind the products"
        )
