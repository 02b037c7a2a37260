"""Load a Hugging Face causal language model, made exact: transformers' parts, in Tandem's layer,
linear and attention.

With `head="value"` the same for a value model, whose head gives one number a token and which no
engine runs.

The module stays transformers' own, parameter names included, so a checkpoint is a plain Hugging
Face directory. What cannot be exact is refused by name, before any work.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.model.attention import PackedPlan, Plan
from tandem.model.config_file import cannot_run, first_line, read_config
from tandem.model.experts import ExactExperts, ExactRouter
from tandem.model.layers import ExactLayer, Rotation, norm, rotation_of
from tandem.model.linear import ExactLinear, padded_rows
from tandem.model.lora import Lora, add_adapter, exact_adapted
from tandem.model.paged_attention import PagedPlan, Runs
from tandem.model.triton.dispatch import triton_for
from tandem.model.weight_files import check_weights
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError

logger = logging.getLogger(__name__)

EXACT_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
SUMS = "SHA256SUMS"  # beside exported weights
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class ExactModel(nn.Module):
    """A causal language model whose logits of a token depend on that token's own prefix and the
    weights only.

    `hidden` and `head` are the two halves that engine and trainer share; a value model's head is
    its `score`, [1, D]. `checkpointing` keeps only the layers' inputs for the backward pass and
    runs each layer once more in it (Chen et al. 2016, arXiv 1604.06174): memory for time, the
    gradients are the same to the last bit.
    """

    def __init__(self, module: Any, lora: Lora | None = None):
        super().__init__()
        self.module, self.lora = module, lora
        self.config = module.config
        self.head: ExactLinear = module.get_output_embeddings() or module.score
        self.checkpointing = False
        self._weights = list(module.parameters())
        linears = {
            name: part for name, part in module.named_modules() if isinstance(part, ExactLinear)
        }
        self.adapted = {name: part for name, part in linears.items() if part.lora_A is not None}
        self._base_only = False

    def hidden(self, tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """tokens and positions int64 [T] -> last hidden states [T, D].

        Rows are padded once here, so that no linear has to; a plan leaves rows that it does not
        know at zero.
        """
        rows, inner = len(tokens), self.module.model
        padding = (0, padded_rows(rows) - rows)
        x = inner.embed_tokens(F.pad(tokens, padding).to(self.device))
        rotation = rotation_of(inner.rotary_emb, x, F.pad(positions, padding).to(self.device))
        for layer in inner.layers:
            x = self._layer(layer, x, rotation, plan)
        return norm(inner.norm, x)[:rows]

    def _layer(self, layer: ExactLayer, x: Tensor, rotation: Rotation, plan: Plan) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            return layer(x, rotation, plan)  # type: ignore[no-any-return]
        # a backward pass may run outside the `adapter_off` of its forward pass
        base_only = self._base_only
        return checkpoint(  # type: ignore[no-any-return]
            layer,
            x,
            rotation,
            plan,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._running(base_only=base_only)),
        )

    def packed_plan(self, segments: np.ndarray) -> Plan:
        """Attention of packed segments, int64 [S, 4] as in types.Microbatch, where the weights
        are."""
        if triton := triton_for(self.head.weight):
            return triton.TritonPackedPlan(segments)  # type: ignore[no-any-return]
        heads, kv_heads, _ = self.heads
        return PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads)

    def paged_plan(self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Runs) -> Plan:
        """Attention of new tokens over a paged cache; see paged.PagedPlan."""
        if triton := triton_for(self.head.weight):
            return triton.TritonPagedPlan(keys, values, runs)  # type: ignore[no-any-return]
        return PagedPlan(keys, values, runs, self.heads[0])

    @property
    def heads(self) -> tuple[int, int, int]:
        """(query heads, key/value heads, head size)"""
        return (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            head_size(self.config),
        )

    def named_weights(self) -> dict[str, Tensor]:
        """Every parameter once, under its Hugging Face name (a tied head is its embedding).

        An adapter's are `....q_proj.lora_A.weight` and `....q_proj.lora_B.weight`, beside the
        base's `....q_proj.weight`.
        """
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def merged_weights(self) -> dict[str, Tensor]:
        """What the model runs with its adapter, under plain Hugging Face names: the very weights
        that are packed."""
        adapter = self.adapter_weights()
        base = {
            name: weight for name, weight in self.named_weights().items() if name not in adapter
        }
        return base | {
            f"{name}.weight": part.whole().merged() for name, part in self.adapted.items()
        }

    def adapter_weights(self) -> dict[str, Tensor]:
        """The factors of the adapter under their names in `named_weights`; empty without one."""
        ends = ("lora_A.weight", "lora_B.weight")
        names = {f"{name}.{end}" for name in self.adapted for end in ends}
        return {name: weight for name, weight in self.named_weights().items() if name in names}

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that an optimizer may change, under their names in `named_weights`."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Run the base weights alone, to the bits of the model without an adapter: a reference that
        costs no second model.

        The adapted linears keep a pack of their base weight from then on.
        """
        with self._running(base_only=True):
            yield

    @contextmanager
    def _running(self, *, base_only: bool) -> Iterator[None]:
        before = self._base_only
        self._run(base_only=base_only)
        try:
            yield
        finally:
            self._run(base_only=before)

    def _run(self, *, base_only: bool) -> None:
        self._base_only = base_only
        for part in self.adapted.values():
            part.base_only = base_only

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def changes(self) -> int:
        """What was computed at another number is stale: it grows with every change of a weight in
        place, by two.

        It is odd inside `adapter_off`, so that no engine mixes the keys of both.
        """
        return 2 * sum(weight._version for weight in self._weights) + (
            self._base_only and bool(self.adapted)
        )

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """In place, so that an engine's and an optimizer's tensors are still the same ones.

        Weights that are not named stay: an adapter's checkpoint holds the adapter only. Raises
        UserError for a name that the model does not have, or has in another shape, before anything
        is written.
        """
        parameters = dict(self.module.named_parameters())
        shapes = {name: list(weight.shape) for name, weight in weights.items()}
        wrong = [
            name
            for name in shapes
            if name not in parameters or shapes[name] != list(parameters[name].shape)
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


def load_model(
    path: str, lora: Lora | None = None, *, head: Literal["tokens", "value"] = "tokens"
) -> ExactModel:
    """A directory or hub name -> the exact model in float32, with an untrained adapter if lora is
    given.

    A value model of a directory without `score.weight`, a language model's, starts with a score of
    exactly zero. Raises UserError when the model is missing or not exact.
    """
    config = check_model(path, head=head)
    _check_sums(Path(path))
    check_weights(path, sum(p.numel() for p in empty_model(path, config, head=head).parameters()))
    return make_exact(_stock_model(path, config, head), lora)


def unfilled_model(path: str, *, head: Literal["tokens", "value"] = "tokens") -> ExactModel:
    """The exact model of a directory with a config and no weights. Its numbers are random until
    `load_weights` fills it."""
    from transformers import GenerationConfig

    module = _stock_class(head).from_config(check_model(path, head=head), dtype=torch.float32)
    if head == "tokens":
        module.generation_config = GenerationConfig.from_pretrained(path)
    return make_exact(module)


def _check_sums(folder: Path) -> None:
    """Raises UserError where weights are not those that were exported; a directory without
    SHA256SUMS is taken as it is."""
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        recorded, _, name = line.partition("  ")
        if name.endswith(".safetensors"):
            found = file_hash(folder / name) if (folder / name).is_file() else "no such file"
            if found != recorded.lower():
                raise UserError(
                    "the weights are not those that were exported",
                    where=str(folder / name),
                    found=found,
                    expected=f"{recorded}, as in {SUMS}",
                    next=f"export them again; or remove {SUMS} if they were changed on purpose",
                )


def empty_model(path: str, config: Any, *, head: Literal["tokens", "value"] = "tokens") -> Any:
    """The module of check_model's config without storage (on the meta device). Raises UserError
    where it cannot be made."""
    try:
        with torch.device("meta"):
            return _stock_class(head).from_config(copy.deepcopy(config))
    except Exception as error:  # a wrong value in config.json raises whatever trips over it
        raise UserError(
            "the model's config cannot be used",
            where=f"{path}/config.json",
            found=first_line(error),
            expected="values that make a model",
        ) from None


def _stock_class(head: Literal["tokens", "value"]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    return AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM


def _stock_model(path: str, config: Any, head: Literal["tokens", "value"]) -> Any:
    """The module with its weights. Of the directory nothing is used but config.json's plain fields
    and safetensors."""
    if head == "value":
        config.num_labels = 1
    how = {
        "dtype": torch.float32,
        "trust_remote_code": False,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    try:
        module, report = _stock_class(head).from_pretrained(path, config=config, **how)
    except Exception as error:  # a damaged file raises whatever its reader trips over
        raise UserError(
            "the model cannot be loaded",
            where=path,
            found=first_line(error),
            expected="weights in safetensors beside config.json",
        ) from None
    missing = set(report["missing_keys"])  # transformers would fill them with random numbers
    if head == "value" and "score.weight" in missing:
        missing.remove("score.weight")
        nn.init.zeros_(module.score.weight)
    if missing:
        raise UserError(
            "the model cannot be loaded",
            where=path,
            expected="a tensor for every parameter of config.json",
            found=f"no weights for {len(missing)} parameters: {', '.join(sorted(missing)[:3])}",
        )
    return module


def check_model(
    path: str, key: str = "model.path", *, head: Literal["tokens", "value"] = "tokens"
) -> Any:
    """The model's transformers config; refuses, without loading weights, what is not there or
    cannot be exact.

    key: the config key that names it; head as in load_model: a value model may start from a
    language model, not the reverse.
    """
    if not path:
        raise UserError(
            "no model is named",
            where=key,
            expected="a Hugging Face directory or hub name",
            next="tandem train RECIPE model.path=DIR",
        )
    folder = Path(path)
    looks_local = folder.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not (folder / "config.json").is_file():
        raise _no_model(path, key)
    if not folder.is_dir():
        logger.warning("looking for %s on the Hugging Face hub", path)
    config = read_config(path, key, EXACT_ARCHITECTURES)
    if head == "tokens" and (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        raise UserError(
            "this is a reward model, which has no tokens to say",
            where=f"{key} = {path}",
            found=config.architectures[0],
            expected="a causal language model",
            next="a reward model can be the critic: critic.path",
        )
    if reasons := why_not_exact(config):
        raise cannot_run(f"{key} = {path}", reasons, EXACT_ARCHITECTURES)
    return config


def _no_model(path: str, key: str) -> UserError:
    """What is there instead of a model directory, and the command that leads to one."""
    folder = Path(path)
    next_command = "tandem tiny DIR makes a tiny model; or give a hub name such as Qwen/Qwen3-0.6B"
    if folder.is_file():
        found, next_command = "a file", f"{key}={folder.parent}, if the model's files are beside it"
    elif str(folder).startswith("~"):
        found, next_command = "a path that no shell has expanded", f"{key}={folder.expanduser()}"
    elif not folder.is_dir():
        found = "no such directory"
    elif (folder / "config.toml").is_file():
        newest = max(folder.glob("hf/step_*"), default=None)
        found, next_command = (
            "a run folder",
            f"{key}={newest}" if newest else f"tandem export {folder}",
        )
    elif (folder / "state.json").is_file():
        found, next_command = (
            "a checkpoint of a run",
            f"tandem export {folder.parent.parent} --step {folder.name[5:].lstrip('0')}",
        )
    else:
        found = f"a directory without config.json: {_names(folder)}"
    return UserError(
        "the model directory does not exist"
        if found == "no such directory"
        else "this is not a model directory",
        where=f"{key} = {path}",
        found=found,
        expected="a Hugging Face model directory (config.json, model.safetensors, tokenizer.json)",
        next=next_command,
    )


def _names(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "empty"


def why_not_exact(config: Any) -> list[str]:
    """Every reason why the exact engine cannot run this transformers config; empty when it can."""
    if config.model_type not in EXACT_ARCHITECTURES:
        return [f"architecture {config.model_type}"]
    reasons = []
    if config.hidden_act != "silu":
        reasons.append(f"activation {config.hidden_act}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        reasons.append(f"rotary embedding {rope}, which depends on the length of the batch")
    if head_size(config) < 8:
        reasons.append(
            f"head size {head_size(config)} (at least 8: smaller matmuls take another kernel)"
        )
    return reasons


def head_size(config: Any) -> int:
    """Width of an attention head; some transformers configs leave it out (getattr: the config is
    not ours)."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def make_exact(module: Any, lora: Lora | None = None) -> ExactModel:
    """Put the exact parts into a transformers module, in place; with lora, PEFT's new adapter
    too."""
    if lora is not None:
        add_adapter(module, lora)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            setattr(parent, name, _exact(child))
    config, layers = module.config, module.model.layers
    for number, layer in enumerate(layers):
        layers[number] = ExactLayer(layer, number, window_of(config, number))
    return ExactModel(module.eval(), lora)


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer, None where it sees everything (the config is transformers'
    own, hence getattr)."""
    types = getattr(config, "layer_types", None)
    full = types is not None and types[layer] != "sliding_attention"
    return None if full else getattr(config, "sliding_window", None)


def _exact(child: Any) -> nn.Module:
    match type(child).__name__:
        case "Linear" if not isinstance(child, nn.Linear):  # PEFT's lora Linear has the same name
            return exact_adapted(child)
        case "Linear":
            return ExactLinear(child.weight, child.bias)
        case "Qwen3MoeTopKRouter":
            return ExactRouter(child)
        case "Qwen3MoeExperts":
            return ExactExperts(child)
        case _:
            return child  # type: ignore[no-any-return]
