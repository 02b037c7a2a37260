"""A random model in a random schedule, as the trainer packs it and as the engine pages it.

`probe` compares the two. Only the arithmetic is tested, without request or scheduler; those are
checked in every step of a run.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.model.attention import PackedPlan, Plan
from tandem.model.config_file import first_line, is_lean, is_sparse, special_float, window_of
from tandem.model.custom_code import from_config
from tandem.model.load import ExactModel, make_exact
from tandem.model.logprobs import log_distribution, token_logprobs
from tandem.model.paged_attention import PAGE, Runs, page_tensors
from tandem.model.rope import positions_of
from tandem.model.thresholds import lower_thresholds
from tandem.types import SamplingDistribution

VOCABULARY, POSITIONS, EXPERTS = 512, 512, 8
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
TRIED, WINDOW = 150, 60  # tokens of a trial of the general path, and its highest threshold
FAR = 8  # tokens at the last positions of a model, beside the others of a trial
MOST_DIFFERENCE = 1e-3  # of the largest logit: rounding in another order, and nothing else
MOST_APART = 1e-5  # likewise between packed and paged sequences, of which 0 is usual
# Tokens of a sequence behind its prefix.
SHORT, LONG = (*range(1, 9), 20, 28, 32, 64), range(255, 261)
CHUNKS = (1, 1, 2, 7, 33, 130, 400)  # new tokens of a sequence in a pass of the engine


def random_model(model: ExactModel, seed: int, dtype: torch.dtype | None = None) -> ExactModel:
    """Make a random model of one layer of each kind in `model`, with its shapes.

    Kinds are layers with and without a window, dense ones and mixtures of experts. The vocabulary
    is small, and experts are few. Of `model` only the config is read, so it may be divided. dtype:
    of the weights that run, if they are not those that it holds.
    """
    config = _one_layer_of_each_kind(model.config, model.splits)
    small = make_exact(random_module(config, seed, dtype or model.dtype, model.device))
    small.split(model.splits)
    return small


def random_module(
    config: Any, seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> Any:
    """Make transformers' module of a config with random weights."""
    config.vocab_size = VOCABULARY
    if getattr(config, "vocab_size_per_layer_input", None):  # of embeddings of each layer
        config.vocab_size_per_layer_input = VOCABULARY
    if config.pad_token_id is not None:
        config.pad_token_id = 0  # among the few tokens
    noise = torch.Generator().manual_seed(seed)
    with no_init_weights():
        options = {"dtype": dtype, "experts_implementation": "eager"}
        module = from_config(AutoModelForCausalLM, config, **options).to(device)
    module.tie_weights()
    for weight in module.parameters():
        spread = torch.randn(weight.shape, generator=noise)
        weight.data.copy_(
            1.0 + 0.1 * spread if weight.dim() <= 1 else spread / weight.shape[-1] ** 0.5
        )
    for part in module.modules():
        norm = getattr(getattr(part, "q_norm", None), "weight", None)
        if norm is not None and getattr(part, "scaling", 0.0) == 1.0:
            # trained norms hold the scale; without one rounding grows from layer to layer
            norm.data.mul_(norm.shape[-1] ** -0.5)
    return module.eval()


def general_fault(config: Any) -> str:
    """Try the general path on a random model of a config's shapes; say in which way it is wrong, ""
    if it is not: transformers' own pass gives other logits, or passes of the engine do, or one
    cannot run.

    Rounding is not looked at here: whether all bits agree the probe says.
    """
    return _fault(config.__class__, config.to_json_string(), config.name_or_path)


class _WatchedPlan(PackedPlan):
    """Knows whether any layer attended by it."""

    attended = False

    def attend(self, *args: Any, **options: Any) -> Tensor:
        self.attended = True
        return super().attend(*args, **options)


@cache
def _fault(config_class: Any, text: str, name: str) -> str:
    """Try the config in JSON, as general_fault. name: of its directory."""
    tokens = torch.randint(VOCABULARY, (TRIED,), generator=torch.Generator().manual_seed(0))
    try:
        whole = config_class.from_dict(json.loads(text, object_hook=special_float))
        whole.name_or_path = name
        config = _one_layer_of_each_kind(whole, 1)
        stock = random_module(config, 0)
        stock.set_attn_implementation("eager")
        with torch.no_grad():
            expected = stock(input_ids=tokens[None], use_cache=False).logits[0]
            del stock  # one at a time: it may have layers of a gigabyte
            exact = make_exact(random_module(config, 0))
            heads, kv_heads, _ = exact.heads
            plan = _WatchedPlan(
                np.array([[0, TRIED, 0, 0]]), group=heads // kv_heads, kv_heads=kv_heads
            )
            found = exact.head(exact.hidden(tokens, torch.arange(TRIED), plan))
            beside_far = _beside_far_positions(exact, tokens)
        schedule = Schedule(exact, 0)
        apart = float((schedule.paged((1,)) - schedule.packed()[0]).abs().max())
    except Exception as error:  # any class of any model runs here
        return first_line(error)
    if not plan.attended:
        return "attention of its own, which transformers' AttentionInterface cannot replace"
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not worst <= MOST_DIFFERENCE * scale:
        return f"logits that differ by {worst:.2g} from transformers' own, of up to {scale:.2g}"
    if not apart <= MOST_APART * scale:
        return f"log-probs that differ by {apart:.2g} between packed and paged sequences"
    if not float((beside_far - found).abs().max()) <= MOST_APART * scale:
        return "a result that depends on the longest position of the pass"
    return ""


def _beside_far_positions(model: ExactModel, tokens: Tensor) -> Tensor:
    """Compute the logits of tokens int64 [T] in a pass with others at the last positions."""
    rows, last = len(tokens), positions_of(model.config)
    plan = model.packed_plan(np.array([[0, rows, 0, 0], [rows, FAR, 0, 0]]))
    positions = torch.cat([torch.arange(rows), torch.arange(last - FAR, last)])
    hidden = model.hidden(F.pad(tokens, (0, FAR)), positions, plan)
    return model.head(hidden[:rows])


def random_like(model: ExactModel, noise: torch.Generator, *shape: int) -> Tensor:
    """Draw a normal tensor of the model's type on its device."""
    return torch.randn(shape, generator=noise).to(model.device, model.dtype)


def _one_layer_of_each_kind(config: Any, splits: int) -> Any:
    """Make the transformers config of a model of the first layer of each kind; of a model that is
    not lean, with those between them."""
    if not is_lean(config):
        return first_layers(config)
    config = copy.deepcopy(config)
    firsts: dict[tuple[int | None, bool], int] = {}
    for number in range(config.num_hidden_layers):
        firsts.setdefault((window_of(config, number), is_sparse(config, number)), number)
    config.num_hidden_layers = len(firsts)
    if getattr(config, "layer_types", None):  # transformers' own, not in every config
        config.layer_types = [config.layer_types[number] for number in firsts.values()]
    if any(sparse for _, sparse in firsts):
        config.mlp_only_layers = [at for at, (_, sparse) in enumerate(firsts) if not sparse]
        config.decoder_sparse_step = 1
        few = max(EXPERTS, config.num_experts_per_tok)
        config.num_experts = min(config.num_experts, few + -few % splits)
    return config


def first_layers(config: Any) -> Any:
    """Make the config of the first layers, as many as hold every kind; thresholds are low
    enough to be passed, experts few."""
    config, kinds = copy.deepcopy(config), _kinds_of_layers(config)
    layers, count = config.num_hidden_layers, 1 + max(kinds.index(kind) for kind in kinds)
    if shared := getattr(config, "num_kv_shared_layers", None):  # the last ones
        config.num_kv_shared_layers = max(0, count - (layers - shared))
    config.num_hidden_layers = count
    for name, value in list(vars(config).items()):
        limits = isinstance(value, list) and any(isinstance(one, float) for one in value)
        if isinstance(value, list) and len(value) == layers and not limits:
            setattr(config, name, value[:count])
    if getattr(config, "max_position_embeddings", None):  # a learned table may be short
        config.max_position_embeddings = max(config.max_position_embeddings, POSITIONS)
    for name in EXPERT_COUNTS:
        if isinstance(number := getattr(config, name, None), int):
            # a router may choose among groups by their two best
            groups = getattr(config, "n_group", None) or 1
            chosen = getattr(config, "num_experts_per_tok", None)
            chosen = chosen or getattr(config, "top_k_experts", None) or 1
            fewest = max(EXPERTS, chosen, 2 * groups)
            setattr(config, name, min(number, fewest))
    lower_thresholds(config, WINDOW)
    return config


def _kinds_of_layers(config: Any) -> list[str]:
    """Describe each layer of a config by the types, shapes and switches of its parts, and by the
    lists of one entry a layer."""
    layers = config.num_hidden_layers
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == layers]
    lists = [v for v in lists if v != list(range(layers))]  # which only numbers them
    with torch.device("meta"):
        module = from_config(AutoModelForCausalLM, config)
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            return [
                f"{_description(layer)} {[value[number] for value in lists]}"
                for number, layer in enumerate(part)
            ]
    return [str(number) for number in range(layers)]  # any may be another one


def _description(layer: nn.Module) -> str:
    return str(
        [
            (
                type(part).__name__,
                [tuple(weight.shape) for weight in part.parameters(recurse=False)],
                [value for value in vars(part).values() if isinstance(value, bool)],
            )
            for part in layer.modules()
        ]
    )


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Set torch's number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Cache:
    """Pages in random order for sequences of the given lengths, in every layer of a model."""

    def __init__(self, model: ExactModel, lengths: Sequence[int], random: np.random.Generator):
        self.model, self._ends = model, np.cumsum([-(-length // PAGE) for length in lengths])
        order = random.permutation(self._ends[-1])
        self.tables = [part.tolist() for part in np.split(order, self._ends[:-1])]
        zeros = partial(model.head.weight.new_zeros, requires_grad=False)
        _, self.keys, self.values = page_tensors(model.config, len(order), zeros)
        self.layer = min(n for n, values in enumerate(self.values) if len(values))

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values [T, K, E] into the pages of every sequence, in the first layer that
        attends, `layer`."""
        for table in self.tables:
            for side, t in ((self.keys, k), (self.values, v)):
                padded = F.pad(t, (0, 0, 0, 0, 0, len(table) * PAGE - len(t)))
                side[self.layer][table] = padded.view(len(table), PAGE, *t.shape[1:]).transpose(
                    1, 2
                )

    def plan(
        self, members: Sequence[int], starts: np.ndarray, counts: np.ndarray
    ) -> tuple[Plan, np.ndarray]:
        """Make (the engine's plan for new tokens of these sequences, their positions).

        Sequences with more pages must come first.
        """
        runs = Runs([self.tables[member] for member in members], starts, counts)
        return self.model.paged_plan(self.keys, self.values, runs), runs.positions


class Schedule:
    """Random sequences with a common prefix, their targets and the gradients of their log-probs."""

    def __init__(self, model: ExactModel, seed: int):
        self.model, self.random = model, np.random.default_rng(seed)
        self.prefix = int(self.random.choice((*range(1, 140), *LONG)))
        self.own = self.random.permutation(SHORT)[:5].tolist()
        common = self.random.integers(0, VOCABULARY, self.prefix)
        self.sequences = [
            np.concatenate([common, self.random.integers(0, VOCABULARY, n)]) for n in self.own
        ]
        targets = self.random.integers(0, VOCABULARY, sum(self.own))
        above = self.random.standard_normal(sum(self.own), np.float32)
        self.targets, self.above = (
            torch.from_numpy(array).to(model.device) for array in (targets, above)
        )

    def packed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the trainer's pass, the prefix once: (log-probs [N], gradients of all weights)."""
        model, prefix = self.model, self.prefix
        firsts = (prefix + np.cumsum([0, *self.own[:-1]])).tolist()
        segments = [(0, prefix, 0, 0)]
        segments += [(first, n, 0, prefix) for first, n in zip(firsts, self.own, strict=True)]
        tokens = np.concatenate(
            [self.sequences[0][:prefix], *(sequence[prefix:] for sequence in self.sequences)]
        )
        positions = np.concatenate(
            [np.arange(prefix), *(np.arange(prefix, prefix + n) for n in self.own)]
        )
        plan = model.packed_plan(np.array(segments))
        hidden = model.hidden(torch.from_numpy(tokens), torch.from_numpy(positions), plan)[prefix:]
        weight = model.head.weight
        logprobs, _ = token_logprobs(
            hidden,
            weight,
            model.head.pack.of(weight),
            self.targets,
            SamplingDistribution(),
            bias=model.head.bias,
            softcap=model.softcap,
        )
        logprobs.backward(self.above)  # type: ignore[no-untyped-call]
        gradients = {
            name: p.grad for name, p in model.module.named_parameters() if p.grad is not None
        }
        model.module.zero_grad(set_to_none=True)
        return logprobs.detach(), gradients

    @torch.no_grad()
    def paged(self, threads: Sequence[int]) -> Tensor:
        """Run the engine's passes over the same tokens: log-probs [N].

        Each pass draws its sequences, their order, chunk sizes and thread count.
        """
        lengths = np.array([len(sequence) for sequence in self.sequences])
        cache, done = Cache(self.model, lengths.tolist(), self.random), np.zeros_like(lengths)
        targets = self.targets.split(self.own)
        logprobs = [torch.zeros(n, device=self.model.device) for n in self.own]
        while (left := np.flatnonzero(done < lengths)).size:
            members = self.random.permutation(left)[: int(self.random.integers(1, len(left) + 1))]
            counts = np.minimum(self.random.choice(CHUNKS, len(members)), (lengths - done)[members])
            plan, positions = cache.plan(members.tolist(), done[members], counts)
            new = [
                self.sequences[m][done[m] : done[m] + n]
                for m, n in zip(members, counts, strict=True)
            ]
            with threads_of(int(self.random.choice(threads))):
                hidden = self.model.hidden(
                    torch.from_numpy(np.concatenate(new)), torch.from_numpy(positions), plan
                )
                logits = self.model.head(hidden).float()
                table = log_distribution(logits, SamplingDistribution())
            for member, rows, start in zip(
                members, table.split(counts.tolist()), done[members], strict=True
            ):
                part = rows[max(self.prefix - start, 0) :]  # the prefix has no targets
                first = max(int(start) - self.prefix, 0)
                own = slice(first, first + len(part))
                logprobs[member][own] = part.gather(1, targets[member][own, None])[:, 0]
            done[members] += counts
        return torch.cat(logprobs)
