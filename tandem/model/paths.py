"""The paths that a model may take: Tandem's own layer (lean), transformers' forward pass made exact
(general), transformers' own operators (inexact), and those of models that also read images.

registry.py names them. A model takes the first path that has nothing against its config, before any
weight is read. Knows no torch and no path's arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.registry import find, names
from tandem.runtime.errors import UserError


class ModelPath:
    """A way to run models of some transformers configs; each path is one object of a subclass."""

    name = ""  # in registry.py

    def why_not(self, config: Any, place: Any) -> str:
        """Say why no model of a transformers config takes this path, "" if one does. place: of its
        weights, a model.placement.Placement."""
        raise NotImplementedError

    def gap(self, config: Any, place: Any) -> str:
        """Say why log-probs of engine and trainer differ by rounding; "" if they agree to the last
        bit, unless the probe finds that this machine's operators do not."""
        return ""

    def maker(self, folder: str, config: Any, place: Any) -> Callable[..., Any]:
        """Return what makes an ExactModel of a stock module and a Lora or None, in place. folder:
        the model directory."""
        return self.build

    def build(self, module: Any, lora: Any = None) -> Any:
        """Make an ExactModel of a stock module, without a model directory."""
        raise NotImplementedError

    def small(self, config: Any, splits: int) -> Any:
        """Make the config of a model of few layers, with every kind. splits: as of ExactModel."""
        raise NotImplementedError

    def linears(self, model: Any) -> list[tuple[Callable[..., Any], Sequence[Any]]]:
        """List what runs ExactLinears of a model's layers, each with those that it runs as one."""
        raise NotImplementedError

    def rowwise(self, config: Any) -> dict[str, tuple[Callable[..., Any], int]]:
        """Return operators on rows that only models of this path have, with their width."""
        return {}

    def foreign_parts(self, model: Any) -> dict[str, Any]:
        """Return the modules of a model whose forward pass is not Tandem's, by name."""
        return {}

    def prompts(self, folder: str, tokenizer: Any) -> Callable[[str, str], Any]:
        """Return what makes of a chat template's text and place the ImagePrompts of plugins/vision:
        prepare(chats), encode(texts, chats, encode). folder: the model directory."""
        raise NotImplementedError


def path_of(config: Any, where: str, place: Any = None) -> ModelPath:
    """Return the path of a model of a transformers config. place: of its weights, by default a CPU
    in float32. Raises UserError if there is none."""
    if reads_more_than_text(config.model_type):
        return parts_of(config.model_type)
    reason = ""
    for name in names("model_paths"):
        path: ModelPath = find("model_paths", name, key=where)
        if not (reason := path.why_not(config, place)):
            return path
    raise UserError(
        "this model cannot run",
        where=f"{where}, architecture {config.model_type}",
        found=reason,
        expected="a causal language model, whose logits depend on the tokens up to their own",
        next="take one of docs/reference/models.md; if it is there, report its config.json",
    )


def named_path(name: str) -> ModelPath:
    """Return a path by its name."""
    return find("model_paths", name, key="model.path")  # type: ignore[no-any-return]


def divisible(config: Any) -> bool:
    """Tell whether a mesh may divide a model of a transformers config. Nothing is tried."""
    return not named_path("lean").why_not(config, None)


def reads_more_than_text(model_type: Any) -> bool:
    """Tell whether models of that type are run with their parts for images."""
    return model_type in names("multimodal_paths")


def parts_of(model_type: Any) -> ModelPath:
    """Return the path of models of a type that reads more than text."""
    return find("multimodal_paths", model_type, key="model.path")  # type: ignore[no-any-return]
