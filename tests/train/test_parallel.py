"""One optimizer step by several processes is that of one, to the last bit or within a stated
bound."""

import ast
from pathlib import Path

import pytest
import torch

import tandem
from tandem.model.forward import batch_logprobs
from tandem.model.schedule import threads_of
from tandem.train.parallel.ranks import ParallelRanks
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model
from tests.support.updates import (
    SAMPLING,
    Halves,
    learner_of,
    microbatches,
    step_alone,
    step_on,
    updated,
)

PACKAGE = Path(tandem.__file__).parent


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("data", [2, 4])
def test_data_parallel_is_one_process_that_accumulates_the_same_shares(kind, data):
    (rows, weights), *others = on_mesh(step_on, kind, data, data=data)
    alone, expected = step_alone(kind, data)
    assert rows == alone and all(other[0] == rows for other in others)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def three_microbatches(model, ranks):
    """Return the log-probs of three microbatches, and the metrics of two updates with them."""
    batches = microbatches(1)[:3]
    found = ranks.forward(
        model, batches, lambda batch: batch_logprobs(model, batch, SAMPLING)[0].detach()
    )
    return [values.tolist() for values in found], updated(learner_of(model, ranks), batches)


def three_on(mesh):
    model, ranks = exact_model("qwen3"), ParallelRanks(mesh)
    ranks.divide(model, torch.float32)
    return three_microbatches(model, ranks)


def test_a_process_without_a_microbatch_counts_nothing_and_values_keep_their_order():
    with threads_of(1):
        expected = three_microbatches(exact_model("qwen3"), Halves(2))
    assert on_mesh(three_on, data=2) == [expected] * 2


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_two_copies_of_divided_weights_step_as_one_process_but_for_the_order_of_sums(kind):
    """Less than 1e-3 of what two steps change in a weight differs, as in test_tensor_parallel."""
    (rows, weights), *others = on_mesh(step_on, kind, 4, data=4, shard=2)
    (alone, expected), before = step_alone(kind, 4), exact_model(kind).named_weights()
    assert all(other[0] == rows for other in others)
    for row, other in zip(rows, alone, strict=True):
        assert row == pytest.approx(other, rel=2e-5)
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-3 * (weight - before[name]).norm(), name


def test_one_process_imports_nothing_of_several():
    """Code that needs other processes imports them inside its functions."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not {"parallel", "megatron"} & set(path.relative_to(PACKAGE).parts):
            for node in ast.parse(path.read_text()).body:
                text = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
                assert "train.parallel" not in text and "train.megatron" not in text, path
