"""A Hugging Face causal language model with Tandem's exact layer, linear and attention, and the
models of all paths (paths.py) from their directories.

With `head="value"` it is a value model, whose head gives one number a token and which no engine
runs. The module stays transformers' own, parameter names included, so a checkpoint is a plain
Hugging Face directory. This file knows no sampling or training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.model.attention import Plan
from tandem.model.config_file import (
    HeadKind,
    check_model,
    first_line,
    head_size,
    heads_of,
    kv_heads_of,
)
from tandem.model.custom_code import from_config
from tandem.model.expert_choices import ExpertChoices
from tandem.model.kernels import Kernels, kernels_of
from tandem.model.layers import embed, norm, rotation_of
from tandem.model.linear import ExactLinear, PackedWeight, PackOwner, Part
from tandem.model.paged_attention import Runs
from tandem.model.paths import divisible, named_path, path_of
from tandem.model.placement import CPU_FLOAT32, Placement
from tandem.model.row_parts import WHOLE
from tandem.model.stock import load_stock, stock_class
from tandem.runtime.errors import UserError

if TYPE_CHECKING:
    from tandem.model.lora import Lora

T = TypeVar("T")


class ExactModel(nn.Module):
    """A causal language model whose logits depend on a token's own prefix and the weights only.

    `hidden` and `head` are the two halves that engine and trainer share; a value model's head is
    its `score`, [1, D]. `checkpointing` keeps only the layers' inputs for the backward pass, which
    runs each layer once more (Chen et al. 2016, arXiv 1604.06174): it saves memory, costs time, and
    gives the same gradients to the last bit.
    """

    softcap = 0.0  # of the logits, as in logprobs.token_logprobs
    path = "lean"  # its name (paths.py)
    engine = "paged"  # what samples from it, in registry.py
    gap = ""  # why the engine's passes differ from the trainer's by rounding; "": they do not

    def __init__(self, module: Any, lora: "Lora | None" = None):
        super().__init__()
        self.module, self.lora = module, lora
        self.config = module.config.get_text_config()
        self.head: ExactLinear = module.get_output_embeddings() or module.score
        self.checkpointing, self.splits = False, 1
        self.row_parts = WHOLE
        self._base_only = False
        # what `hidden` starts from in a later stage of a pipeline, [T', D] as `states` returns them
        self.entering: Tensor | None = None
        self.list_weights()

    def list_weights(self) -> None:
        """Look up the module's weights again, after some were replaced or removed."""
        self._weights = list(self.module.parameters())
        self.adapted = {
            name: part
            for name, part in self.module.named_modules()
            if isinstance(part, ExactLinear) and part.lora_A is not None
        }

    def forward(self, compute: Callable[[], T]) -> T:
        """Run a computation over this model's parts, as one forward pass of the module: a model
        whose weights are divided among processes gathers them around it."""
        return compute()

    def hidden(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        """Compute the last hidden states [T, D] of tokens and positions, int64 [T]. choices: of the
        tokens' experts, as in ExactLayer."""
        states = self.states(tokens, positions, plan, choices)
        return norm(self.module.model.norm, states)[: len(tokens)]

    def states(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        """Compute the states [T', D] before the final norm, from the embedding or from `entering`.

        Rows are padded once here to T', so that no linear has to. A plan leaves padding rows at
        zero.
        """
        rows, inner = len(tokens), self.module.model
        table, x = inner.embed_tokens.weight, self.entering
        padding = (0, self.kernels.count_rows(rows, plan, table.dtype) - rows)
        if x is None:
            tokens = F.pad(tokens, padding).to(table.device)
            x = F.embedding(tokens, table) if table.dtype == torch.float32 else embed(table, tokens)
        rotation = rotation_of(inner.rotary_emb, x, F.pad(positions, padding).to(self.device))
        if not torch.is_grad_enabled():
            return self.kernels.run_layers(self, x, rotation, plan, choices)
        # a backward pass may run outside the `adapter_off` of its forward pass
        base_only = self._base_only
        for layer in inner.layers:
            if not self.checkpointing:
                x = layer(x, rotation, plan, choices)
                continue
            again = partial(self._running, base_only)
            # False: all of it is computed again
            x = run_twice(again, layer, x, rotation, plan, choices, False)
        return x

    def split(self, count: int) -> None:
        """Give log-probs the bits of `count` tensor-parallel processes, whose sums over heads and
        inner features (or experts) are made of as many parts."""
        self.splits = count
        for layer in self.module.model.layers:
            layer.split(count)

    def packs(self) -> list[PackedWeight]:
        """Return the packs of all linears."""
        owners = [part for part in self.modules() if isinstance(part, PackOwner)]
        return [pack for owner in owners for pack in owner.packs()]

    @property
    def kernels(self) -> Kernels:
        return kernels_of(self.head.weight)

    def packed_plan(self, segments: np.ndarray) -> Plan:
        """Plan the attention of packed segments, int64 [S, 4] as in types.Microbatch."""
        heads, kv_heads, _ = self.heads
        return self.kernels.packed_plan(segments, self.device, heads, kv_heads)

    def paged_plan(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs) -> Plan:
        """Plan the attention of new tokens over a paged cache, as paged_attention.PagedPlan."""
        return self.kernels.paged_plan(keys, values, runs, self.heads[0])

    @property
    def window(self) -> int | None:
        """Return the most tokens that a layer sees, the query's own among them; None: all."""
        windows = [layer.window for layer in self.module.model.layers]
        return None if None in windows else max(windows)

    @cached_property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and head size; no heads in Mamba."""
        config = self.config
        return heads_of(config), kv_heads_of(config), head_size(config)

    def named_weights(self) -> dict[str, Tensor]:
        """Return every parameter once, by its Hugging Face name (a tied head is its embedding).

        An adapter's are `....q_proj.lora_A.weight` and `....q_proj.lora_B.weight`, beside the
        base's `....q_proj.weight`.
        """
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def merged_weights(self) -> dict[str, Tensor]:
        """Return the weights that run, the adapter merged, by their plain Hugging Face names."""
        return dict(self.merged())

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Make `merged_weights` one after another: not all are there at once."""
        adapted = {f"{name}.weight": part for name, part in self.adapted.items()}
        factors = self.adapter_weights()
        for name, weight in self.named_weights().items():
            if name not in factors:
                yield name, (adapted.get(name) or Part(weight)).merged()

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapter's factors by their names in `named_weights`; empty without one."""
        ends = ("lora_A.weight", "lora_B.weight")
        names = {f"{name}.{end}" for name in self.adapted for end in ends}
        return {name: w for name, w in self.named_weights().items() if name in names}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimizer may change, by their names in `named_weights`."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def adapter_off(self) -> AbstractContextManager[None]:
        """Run the base weights alone, to the bits of the model without an adapter.

        That gives a reference without a second model. The adapted linears keep a pack of their base
        weight from then on.
        """
        return self._running(True)

    @contextmanager
    def _running(self, base_only: bool) -> Iterator[None]:
        before = self._base_only
        self._set_base_only(base_only)
        try:
            yield
        finally:
            self._set_base_only(before)

    def _set_base_only(self, base_only: bool) -> None:
        self._base_only = base_only
        for part in self.adapted.values():
            part.base_only = base_only

    def save_reader(self, source: str, folder: Path) -> None:
        """Copy what a model reads beside text with from the model directory `source`: nothing."""

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def changes(self) -> int:
        """Return a version counter of the weights: a cached result of another value is stale.

        It grows with every change in place. It is even with the adapter, odd inside `adapter_off`,
        so that no engine mixes the keys of both.
        """
        off = self._base_only and bool(self.adapted)
        return 2 * sum(weight._version for weight in self._weights) + off

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the parameters in place: engine and optimizer hold the same tensors.

        Parameters without a name among them stay: an adapter's checkpoint holds the adapter only.
        Raises UserError, before anything is written, for a name that the model lacks or has in
        another shape.
        """
        parameters = self.named_weights()
        wrong = [
            name
            for name, weight in weights.items()
            if name not in parameters or weight.shape != parameters[name].shape
        ]
        if wrong:
            raise UserError(
                "the weights are not this model's",
                where=", ".join(wrong[:3]),
                found=f"{len(wrong)} of {len(weights)} names that it lacks or has in another shape",
                expected="the model, and the adapter, that the weights were saved from",
            )
        for name, weight in weights.items():
            parameters[name].copy_(weight)


def run_twice(again: Callable[[], Any], run: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    """Run a part of which only the inputs are kept: a backward pass runs it once more, in the
    context that `again` makes."""
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(run, *args, context_fn=lambda: (nullcontext(), again()), **options, **more)


def load_model(
    path: str,
    lora: "Lora | None" = None,
    *,
    head: HeadKind = "tokens",
    place: Placement = CPU_FLOAT32,
) -> ExactModel:
    """Load a directory or hub name, with a new adapter if lora is given.

    place: the device and the type of the weights, which are read in that type. A value model made
    of a language model, which has no `score.weight`, starts with a score of exactly zero. Raises
    UserError if the model is missing or cannot run.
    """
    config = check_model(path, head=head)
    make = path_of(config, f"model.path = {path}", place).maker(path, config, place)
    return make(load_stock(path, config, head, place), lora)  # type: ignore[no-any-return]


def weight_conversions(module: Any) -> list[Any]:
    """Return how transformers changes names and shapes of a module's weights when it loads them,
    and back when it saves them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: list[Any] | None = getattr(module, "_weight_conversions", None)
    return get_model_conversion_mapping(module, add_legacy=False) if found is None else found


def empty_model(path: str, config: Any, *, head: HeadKind = "tokens") -> Any:
    """Make the module of check_model's config without storage, on the meta device.

    Raises UserError if transformers cannot make it.
    """
    try:
        with torch.device("meta"):
            return from_config(stock_class(head, config), config)
    except Exception as error:  # a wrong value in config.json may raise anything
        raise UserError(
            "the model's config cannot be used",
            where=f"{path}/config.json",
            found=first_line(error),
            expected="values that make a model",
        ) from None


def make_exact(module: Any, lora: "Lora | None" = None) -> ExactModel:
    """Put the parts of the exact path for its config into a transformers module in place, and with
    lora a new adapter. Nothing is tried."""
    path = named_path("lean" if divisible(module.config) else "general")
    return path.build(module, lora)  # type: ignore[no-any-return]
