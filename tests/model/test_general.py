"""transformers' own forward pass, made exact: any architecture has one set of bits in engine and
trainer, transformers' gradients, and leaves as a directory that transformers loads."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig
from transformers.activations import ACT2FN

from tandem.config.schema import Config
from tandem.jobs.models import check_models
from tandem.model.config_file import check_model
from tandem.model.forward import batch_logprobs
from tandem.model.general import make_general
from tandem.model.load import load_model
from tandem.model.lora import add_adapter
from tandem.model.paths import divisible
from tandem.model.placement import Placement
from tandem.model.probe import Exactness, probe
from tandem.plugins.distill.inputs import _check_logits
from tandem.run_folder.export import export
from tandem.runtime.errors import UserError
from tandem.trainer.pack import pack
from tandem.types import SamplingDistribution
from tandem.weights.hashing import weight_hash
from tests.support.architectures import (
    ARCHITECTURES,
    INEXACT,
    LEAN,
    architecture,
    by_need,
    exact,
    inexact,
    stock,
    why_inexact,
)
from tests.support.parity import engine_for, gap_of, random_requests
from tests.support.tiny import (
    LORA,
    exact_logits,
    moved,
    random_samples,
    random_tokens,
    save_model,
    stock_logits,
)

# What they have that others lack: a soft cap, windows and two rotary embeddings, biases in the
# head and layers beside each other, norms behind, a factor of the logits, one query head a key
# head, learned positions, Conv1D, sinks with experts that have biases, experts, latent attention
# with narrow values beside a router of sigmoids, short convolutions, layers of two widths, linear
# biases.
KINDS = (
    *("gemma2", "gemma3_text", "phi", "olmo2", "cohere2", "gpt_neox", "opt", "gpt2"),
    *("gpt_oss", "mixtral", "deepseek_v3", "lfm2", "gemma4_text", "bloom"),
)
FILTERED = SamplingDistribution(temperature=0.7, top_p=0.9, repetition_penalty=1.2)


@pytest.mark.parametrize("name", by_need(ARCHITECTURES))
def test_packed_documents_have_the_logits_of_transformers(name):
    random, model, twin = np.random.default_rng(3), exact(name), stock(name)
    documents = [random_tokens(random, length) for length in (1, 30, 7, 61)]
    with torch.no_grad():
        for document, found in zip(documents, exact_logits(model, documents), strict=True):
            scaled = stock_logits(twin, document)
            assert (found - scaled).abs().max() <= 2e-5 * scaled.abs().max()
            assert torch.equal(exact_logits(model, [document])[0], found)


@pytest.mark.parametrize("name", by_need(KINDS))
def test_engine_and_policy_agree_in_gradient_mode(name):
    assert gap_of(exact(name)) == 0.0


@pytest.mark.parametrize("name", by_need([*KINDS, "nemotron"]))
def test_probe_finds_nothing(name):
    assert probe(exact(name), 1) == Exactness(parity=[], thread_dependent=[])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_probe_tries_more_positions_than_a_short_model_has(name):
    assert probe(exact(name, max_position_embeddings=256), 39).parity == []


@pytest.fixture
def activation(monkeypatch):
    """Gives a function a name among transformers' activations."""

    def register(function):
        class OwnActivation(torch.nn.Module):
            def forward(self, x):
                return function(torch.relu(x))

        monkeypatch.setitem(ACT2FN, "own", OwnActivation)
        return "own"

    return register


def odd(x, is_odd):
    """Another last bit, as another kernel would give."""
    return torch.nextafter(x, x + 1) if is_odd else x


def test_part_that_differs_with_the_row_count_is_named(activation):
    name = activation(lambda x: odd(x, x.shape[1] >= 33))
    model = exact("olmo2", hidden_act=name)
    assert probe(model).parity == ["layers.0.mlp.act_fn (OwnActivation): 1 rows"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("ernie4_5_moe", {"moe_layer_start_index": 1}),
        ("glm4_moe", {"first_k_dense_replace": 1}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
    ],
)
def test_experts_of_a_later_layer_are_tried(name, change, activation):
    """Experts map rows [T, I], others [1, T, I]."""
    odd_in_experts = activation(lambda x: odd(x, x.dim() == 2 and len(x) >= 17))
    assert probe(exact(name, hidden_act=odd_in_experts, **change)).parity
    assert probe(exact(name, **change)).parity == []


def gradients(model, logprobs):
    logprobs.sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", by_need([*KINDS, "gemma2 with filters"]))
def test_gradients_are_those_of_transformers(name):
    """Sums in another order are all that may differ."""
    name, _, filters = name.partition(" ")
    sampling = FILTERED if filters else SamplingDistribution()
    [batch] = pack([random_samples(np.random.default_rng(4), 1)[1]], 100)
    model, twin = exact(name), stock(name)
    logprobs, _ = batch_logprobs(model, batch, sampling)
    found = gradients(model.module, logprobs)
    logits = stock_logits(twin, batch.tokens)[torch.from_numpy(batch.rows)]
    targets = torch.from_numpy(batch.targets)[:, None]
    if sampling is FILTERED:
        logits = logits.clone()
        for row, place in enumerate(batch.rows):
            seen = torch.from_numpy(np.unique(batch.tokens[: place + 1]))
            values = logits[row, seen]
            logits[row, seen] = torch.where(values > 0, values / 1.2, values * 1.2)
        table = (logits / 0.7).log_softmax(-1)
        ranked, order = table.exp().sort(-1, descending=True)
        kept = torch.zeros_like(table, dtype=torch.bool)
        kept.scatter_(1, order, ranked.cumsum(-1) - ranked < 0.9).scatter_(1, targets, True)
        logits = table.masked_fill(~kept, float("-inf"))
    expected = gradients(twin, logits.log_softmax(-1).gather(1, targets))
    assert set(found) == set(expected)
    for weight, gradient in expected.items():
        bound = 1e-4 * gradient.abs().max() + 1e-5
        assert (found[weight] - gradient).abs().max() <= bound, weight


@pytest.mark.parametrize("name", ["gemma2", "phi", *by_need(INEXACT)])
def test_checkpointing_changes_no_bit(name):
    [batch] = pack(random_samples(np.random.default_rng(5), 3), 400)
    results = []
    for checkpointing in (False, True):
        model = inexact(name) if name in INEXACT else exact(name)
        model.checkpointing = checkpointing
        logprobs, _ = batch_logprobs(model, batch, SamplingDistribution())
        results.append([logprobs.detach(), *gradients(model.module, logprobs).values()])
    assert all(map(torch.equal, *results))


def saved(name, folder):
    return save_model(stock(name), folder, characters="abc")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        *product(("gemma3_text", "phi", "gpt2"), (0, 4)),
        *(("granite", 0), ("deepseek_v3", 4), ("lfm2", 4), ("gemma4_text", 4)),
        *(("mamba2", 0), ("qwen3_5_text", 4), ("qwen3_next", 4)),
    ],
)
def test_export_has_the_weights_that_ran(name, rank, tmp_path):
    path = saved(name, tmp_path / "model")
    model = moved(load_model(path, LORA if rank else None))
    assert bool(model.gap) == (name in INEXACT)
    assert model.gap or gap_of(model, 2, prompts=2, longest=60, group=2) == 0.0
    export(model, path, tmp_path / "out", "# A model\n")
    stock_again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = random_tokens(np.random.default_rng(0), 50)
    expected, again = stock_logits(stock_again, tokens), load_model(str(tmp_path / "out"))
    assert again.config.model_type == name
    assert weight_hash(again.merged()) == weight_hash(model.merged())
    found = exact_logits(model, [tokens])[0]
    assert torch.equal(exact_logits(again, [tokens])[0], found)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_model_without_linear_modules_takes_no_adapter():
    class Bare(torch.nn.Module):
        base_model_prefix, config = "model", architecture("olmo2")
        base_model = torch.nn.Embedding(2, 8)

    with pytest.raises(UserError, match="targets are not in this model") as error:
        add_adapter(Bare(), LORA)
    assert "it has none" in error.value.expected


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("name", LEAN)
def test_lean_layer_and_general_path_have_the_same_bits(name):
    """Gradients do not: the lean layer sums those of its fused linears in another order, and has
    torch's own derivative of SiLU."""
    lean, general = exact(name), make_general(stock(name))
    assert divisible(lean.config)
    documents = [random_tokens(np.random.default_rng(3), length) for length in (1, 30, 7, 161)]
    pairs = zip(exact_logits(lean, documents), exact_logits(general, documents), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    requests = random_requests(np.random.default_rng(1), prompts=5, longest=200, group=3)
    results = [engine_for(model, max_batch=8).generate(requests) for model in (lean, general)]
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs)
    [batch] = pack([random_samples(np.random.default_rng(4), 1)[1]], 100)
    found, expected = (
        gradients(model.module, batch_logprobs(model, batch, SamplingDistribution())[0])
        for model in (general, lean)
    )
    for (weight, gradient), other in zip(expected.items(), found.values(), strict=True):
        assert (gradient - other).abs().max() <= 1e-5 * gradient.abs().max() + 1e-6, weight


def test_architectures_of_the_lean_layer_keep_it():
    assert not any(divisible(architecture(name)) for name in ARCHITECTURES)


def test_a_model_that_would_be_wrong_is_refused(tmp_path):
    BertConfig(hidden_size=96, num_attention_heads=6, intermediate_size=172).save_pretrained(
        tmp_path
    )
    check_model(str(tmp_path))  # its config alone does not tell
    with pytest.raises(UserError, match="this model cannot run") as error:
        load_model(str(tmp_path))
    assert "logits that are not the last states" in error.value.found


def test_a_model_that_sees_a_little_of_its_neighbours_is_refused(activation):
    leaky = activation(lambda x: x + 1e-2 * x.mean(1, keepdim=True))
    with pytest.raises(UserError, match="this model cannot run") as error:
        why_inexact(architecture("olmo2", hidden_act=leaky))
    assert "depend on later tokens" in error.value.found
    assert "report its config.json" in error.value.next  # olmo2 is listed


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt_oss", {"intermediate_size": 150}),
        ("mixtral", {"intermediate_size": 150}),
        ("qwen2_moe", {"moe_intermediate_size": 33}),
    ],
)
def test_experts_of_any_width_are_tried_and_exact(name, sizes):
    assert why_inexact(architecture(name, **sizes)) == ""


def test_a_gpu_has_no_general_exact_path():
    gpu = Placement(torch.device("cuda", 0), torch.bfloat16)
    assert "it runs on cuda" in why_inexact(architecture("olmo2"), gpu)


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen2_moe"])
def test_config_that_transformers_writes_for_itself_is_read(name, tmp_path):
    """One has an infinity in it, one a window of 0."""
    config = load_model(saved(name, tmp_path)).config
    assert config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()


def test_names_that_lfm2_files_have_are_read(tmp_path):
    values = {"model_type": "lfm2", "block_ff_dim": 1000, "tie_embedding": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = check_model(str(tmp_path))
    assert config.intermediate_size == 1000 and not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "settings", "others", "head", "said"),
    [
        ("olmo2", {"parallel": {"data": 2}}, [], "tokens", "in one process"),
        ("granite", {}, ["critic.path"], "tokens", "no value head"),
        ("granite", {}, [], "value", "no value head"),
        (
            "mixtral",
            {"rl": {"router_replay": True}},
            [],
            "tokens",
            "no experts to balance, or whose choice",
        ),
    ],
)
def test_what_the_path_does_not_run_is_refused_before_models_are_loaded(
    name, settings, others, head, said, tmp_path
):
    path = saved(name, tmp_path)
    with pytest.raises(UserError) as error:
        check_models(Config(model={"path": path}, **settings), *others, head=head)
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "a soft cap of 30"), ("phi", "a bias")])
def test_a_divergence_of_other_logits_than_products_is_refused(name, reason, tmp_path):
    path = saved(name, tmp_path)
    with pytest.raises(UserError, match=reason):
        _check_logits(path, check_model(path), "distill.teacher")
