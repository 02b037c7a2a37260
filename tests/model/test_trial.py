"""Faults that a trial of the general path finds, though few tokens do not show them."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Lfm2Config,
    MiniMaxM3VLTextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
)
from transformers.masking_utils import create_chunked_causal_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.model.load import make_exact
from tandem.model.rope import positions_of
from tandem.model.schedule import random_model
from tandem.model.trial import general_fault
from tandem.runtime.errors import UserError
from tests.support.architectures import GROUPED, SHAPE, architecture, exact, stock
from tests.support.parity import engine_for, largest_gap, random_requests
from tests.support.tiny import exact_logits, random_tokens, stock_logits

SPARSE = {
    **SHAPE,
    **GROUPED,
    "head_dim": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
    "mlp_layer_types": ["dense"] * 3,
    "dense_intermediate_size": 172,
    "index_n_heads": 2,
    "index_head_dim": 16,
}


def fault_of(config):
    found = general_fault(config)
    assert found
    return found


def test_keys_that_a_model_chooses_itself_are_not_exact():
    """They are all keys up to 2,048 tokens, the best beyond."""
    assert "attention by block_indices" in fault_of(MiniMaxM3VLTextConfig(**SPARSE))


class FarSightedConfig(Olmo2Config):
    model_type = "far_sighted"


class FarSighted(Olmo2ForCausalLM):
    """A model of which every token changes once one of a pass lies beyond 2,000 others, as some
    rotary embeddings do."""

    config_class = FarSightedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_hook(self.stretch, with_kwargs=True)

    @staticmethod
    def stretch(_, __, inputs, out):
        positions = inputs.get("position_ids")
        if positions is not None and positions.max() > 2000:
            out.last_hidden_state = out.last_hidden_state * 1.01


class ChunkedConfig(Olmo2Config):
    model_type = "chunked"
    attention_chunk_size: int | None = 8192


class Chunked(Olmo2ForCausalLM):
    """A model whose tokens see those of their own chunk alone."""

    config_class = ChunkedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(partial(self.hide, config), with_kwargs=True)

    @staticmethod
    def hide(config, _, inputs, others):
        x, position_ids = inputs[0], others["position_ids"]
        mask = create_chunked_causal_mask(config, x, None, None, position_ids)
        return inputs, {**others, "attention_mask": mask}


@pytest.fixture(autouse=True)
def own_architectures():
    for config, model in ((FarSightedConfig, FarSighted), (ChunkedConfig, Chunked)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
    yield
    for config in (FarSightedConfig, ChunkedConfig):
        del CONFIG_MAPPING._extra_content[config.model_type]
        del AutoModelForCausalLM._model_mapping._extra_content[config]


def test_attention_that_is_another_beyond_thousands_of_tokens_is_not_exact():
    assert "logits that differ" in fault_of(ChunkedConfig(**SHAPE, **GROUPED))


def test_model_that_depends_on_the_longest_position_of_a_pass_is_not_exact():
    shape = {**SHAPE, **GROUPED}
    assert "longest position" in fault_of(FarSightedConfig(**shape))
    # no sequence of this one is so long
    assert not general_fault(FarSightedConfig(**{**shape, "max_position_embeddings": 2000}))


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 600,
    "short_factor": [1.0 + n / 8 for n in range(8)],
    "long_factor": [2.0 + n for n in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("rope", "positions"), [(LONG, 600), (DYNAMIC, 4096)], ids=["longrope", "dynamic"]
)
def test_rotary_embedding_is_exact_up_to_the_length_from_which_it_changes(rope, positions):
    config = architecture("smollm3", rope_parameters=rope)
    assert positions_of(config) == positions
    assert not general_fault(config)


def test_engine_takes_no_sequence_that_longrope_would_turn_otherwise():
    changes = {"rope_parameters": LONG, "original_max_position_embeddings": 600}
    model = exact("phi3", **changes)
    engine = engine_for(model)
    assert engine.longest == 600
    requests = random_requests(np.random.default_rng(0), prompts=3, longest=550, group=2)
    assert largest_gap(model, requests, engine.generate(requests), 2000, gradients=True) == 0.0
    [document] = [random_tokens(np.random.default_rng(1), 600)]
    with torch.no_grad():
        [found], expected = (
            exact_logits(model, [document]),
            stock_logits(stock("phi3", **changes), document),
        )
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    with pytest.raises(UserError, match="longer than the model can place") as error:
        engine.generate([replace(requests[0], prompt=np.zeros(600, np.int64))])
    assert "600 (the model's original_max_position_embeddings)" in error.value.expected


def test_list_that_numbers_the_layers_does_not_make_each_a_kind():
    """All of a large model's would not fit the memory."""
    config = Lfm2Config(**{**SHAPE, **GROUPED, "num_hidden_layers": 5}, full_attn_idxs=[*range(5)])
    model = make_exact(AutoModelForCausalLM.from_config(config))
    assert random_model(model, 0).config.num_hidden_layers == 1
