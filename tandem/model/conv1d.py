"""transformers' Conv1D (GPT-2) on the exact linear: a linear whose weight is [I, O]."""

from typing import Any

from tandem.model.linear import ExactLinear, Part


class ExactConv1D(ExactLinear):
    """A Conv1D with the exact forward, on the same parameters; an adapter's factors are as those of
    other linears."""

    def active_part(self) -> Part:
        return Part(self.weight.t(), self.bias) if self.base_only else self.adapted_part()

    def adapted_part(self) -> Part:
        part = super().adapted_part()
        return part._replace(weight=part.weight.t())


def is_conv1d(module: Any) -> bool:
    """Tell whether a module is transformers' Conv1D, without importing transformers."""
    return type(module).__name__ == "Conv1D"
