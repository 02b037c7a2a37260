"""Out of memory as a user's error: the settings that would save most, and how much."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.config.schema import Config
from tandem.plugins.plan.meshes import memory_of_run
from tandem.plugins.plan.resources import Need, Sizes, model_sizes, savings
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError

CPU_ALLOCATOR = "can't allocate memory"  # in the message of PyTorch's
NAMED = 3  # settings
# it sums gradients in another order, so a run that is under way keeps its value
CHANGES_BITS = "train.tokens_per_microbatch"


@contextmanager
def explain_out_of_memory(config: Config, command: str) -> Iterator[None]:
    """Turn an allocation that failed inside into a UserError; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, config, command) from error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an allocation on a GPU or on the CPU has failed."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or CPU_ALLOCATOR in str(error)


def _out_of_memory(error: Exception, config: Config, command: str) -> UserError:
    sizes = model_sizes(config, command)

    def needs(sizes: Sizes, config: Config) -> list[Need]:
        return memory_of_run(sizes, config, command, config.data.max_prompt_tokens)

    needed = sum(size for _, size, _ in needs(sizes, config))
    settings = [
        f"{setting} saves {human_bytes(size)}"
        + " (in a new run.folder)" * setting.startswith(CHANGES_BITS)
        for setting, size in savings(sizes, config, needs)[:NAMED]
    ]
    return UserError(
        "out of memory",
        where=f"{sizes.place.device}, {config.model.path}",
        found=str(error).strip().partition("\n")[0],
        expected=f"about {human_bytes(needed)} and the passing tensors of a step (tandem plan)",
        next="nothing is lost: the same command goes on from the last checkpoint, with one of "
        + "; ".join(settings),
    )
