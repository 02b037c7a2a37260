"""Out of memory as a user's error: the settings that would save most, and how much."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.config.schema import Config
from tandem.registry import find

CPU_ALLOCATOR = "can't allocate memory"  # in the message of PyTorch's


@contextmanager
def explain_out_of_memory(config: Config, command: str) -> Iterator[None]:
    """Turn an allocation that failed inside into a UserError; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advise = find("resources", "memory", key="out of memory")
        raise advise(error, config, command) from error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an allocation on a GPU or on the CPU has failed."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or CPU_ALLOCATOR in str(error)
