"""Counts the operators that run in a block."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts the operators that run inside of it, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @property
    def products(self):
        """Products of oneDNN's linear."""
        return sum(count for name, count in self.counts.items() if "linear" in name)
