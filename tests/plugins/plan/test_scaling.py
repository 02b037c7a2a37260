"""Formulas of memory, communication and time over a mesh, and `tandem plan --gpus`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config.parallel import Parallel
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.model.placement import Placement
from tandem.plugins.plan.footprint import Footprint, Sizes, model_sizes
from tandem.plugins.plan.meshes import plans, possible_meshes, smallest, why_refused
from tandem.plugins.plan.scaling import GPUS, MEMORY, communication, flops_per_token, update_time
from tandem.plugins.plan.shards import Model, Work, largest_layer, memory, parameters, part_of
from tandem.trainer.pack import pack
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.types import SamplingDistribution
from tests.support.home import output_of
from tests.support.meshes import on_mesh, sent_bytes
from tests.support.tiny import CONFIGS, exact_model, random_samples, stock_model, tiny_config

ALONE, H200 = Parallel(), GPUS["h200"]
GPU = Placement(torch.device("cuda"), torch.bfloat16)
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 16}


def model_of(shape):
    return Model(shape=shape, count=parameters(shape))


def work(kind="qwen3", dtype=torch.bfloat16, **changes):
    shape = tiny_config(kind, **EVEN, intermediate_size=176)
    if kind == "qwen3_moe":
        shape.num_experts = 8
    values = {"clusters": 64, "cluster": 100, "length": 100.0, "microbatch": 1600}
    return Work(model=model_of(shape), dtype=dtype, **(values | changes))


def run_of(home, *changes):
    """The Footprint of a recipe with changes, on a GPU."""
    config = load_config(home / "recipe.toml", list(changes))
    sizes = replace(model_sizes(config, "train"), place=GPU)
    return Footprint(sizes=sizes, config=config, command="train", longest=20)


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_the_model(kind):
    model = exact_model(kind)
    assert parameters(model.config) == sum(p.numel() for p in model.module.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "pipeline": 4}, {"pipeline": 2}])
def test_parts_of_all_ranks_are_the_whole_model(kind, sizes):
    shape, mesh = work(kind).shape, Parallel(**sizes)
    held = sum(
        part_of(shape, mesh, stage).held(mesh) * mesh.replicas for stage in range(mesh.pipeline)
    )
    copied = shape.tie_word_embeddings and mesh.pipeline > 1  # tied embeddings are in both ends
    assert held == parameters(shape) + copied * shape.vocab_size * shape.hidden_size


def test_gradients_of_several_microbatches_add_up_undivided():
    whole = 4 * parameters(work().shape)
    one, several = (
        memory(work(clusters=clusters), Parallel(data=4))["gradients"] for clusters in (64, 128)
    )
    assert one < several == whole


@pytest.mark.parametrize(
    "override", ["train.offload_optimizer=true", "train.activation_checkpointing=true"]
)
def test_one_process_has_no_communication(home, override):
    work = run_of(home, override).work
    assert set(communication(work, ALONE).values()) == {0.0}
    times = update_time(work, ALONE, H200)
    assert times.total == times.products and times.communication == 0


def bytes_of_update(mesh, shape, batches):
    """The bytes that this process sends in an update of these microbatches."""
    model, ranks = make_exact(stock_model(shape)), ParallelRanks(mesh)
    ranks.divide(model, torch.float32)

    def loss(batch):
        logprobs, _ = batch_logprobs(model, batch, SamplingDistribution())
        return -logprobs.sum(), {}

    return sent_bytes(lambda: ranks.backward(model, batches, loss), mesh.world.size)


def work_of(shape, count, tokens):
    """An update of so many microbatches, each one cluster of so many tokens."""
    sizes = dict.fromkeys(("cluster", "length", "microbatch"), tokens)
    return Work(model=model_of(shape), dtype=torch.float32, clusters=count, **sizes)


def test_fsdp_sends_as_much_as_its_formula_says():
    """On the mesh itself: two microbatches a process, and parameters that two divides."""
    shape = tiny_config("qwen3", vocab_size=98)
    batches = pack(random_samples(np.random.default_rng(5), 6), 60, shares=2)
    sent, other = on_mesh(bytes_of_update, shape, batches, data=2)
    step = work_of(shape, len(batches), 60)
    assert step.microbatches(Parallel(data=2)) == 2
    expected = communication(step, Parallel(data=2))
    assert sent == other == expected["data"] + expected["gradients"]


@pytest.mark.parametrize(
    ("kind", "extra", "dimension"),
    [
        ("qwen3", {}, "tensor"),
        ("qwen3", {}, "context"),
        ("qwen3_moe", {"num_experts": 8}, "expert"),
    ],
)
def test_layers_send_as_much_as_their_formulas_say(kind, extra, dimension):
    """To what else is sent (values of targets, sums of norms) and the padding of rows; an expert's
    tokens are not evenly divided."""
    shape = tiny_config(kind, **EVEN, vocab_size=98, **extra)
    batches = [pack(random_samples(np.random.default_rng(5), 6), 64)[0]] * 2
    sent = sum(on_mesh(bytes_of_update, shape, batches, **{dimension: 2})) / 2
    step = work_of(shape, 2, len(batches[0].tokens))
    expected = sum(communication(step, Parallel(**{dimension: 2})).values())
    assert sent == pytest.approx(expected, rel=0.15)


def test_hybrid_shards_send_to_other_nodes_what_zhao_et_al_count():
    """2 M (W - 1) / (G W) between nodes of G, to within the ring's own (W - 1) / W."""
    step, mesh = work(dtype=torch.float32), Parallel(data=16, shard=8)
    weights = 4 * parameters(step.shape)
    assert communication(step, mesh)["replicas"] == 2 * weights / 8 * (1 / 2)


def test_flops_are_six_a_parameter_and_those_of_causal_attention():
    shape = work().shape
    layer, head = flops_per_token(shape, 100.0)
    norms = 4 * (2 * 96 + 2 * 16) + 96
    attention = 6 * 4 * 100 * 8 * 16
    assert 4 * layer + head == 6 * (parameters(shape) - norms) + attention


def test_frozen_weights_take_four_flops_a_parameter_and_checkpointing_two_more():
    shape, adapters = work().shape, 1000
    (layer, head), (whole, whole_head) = (
        flops_per_token(shape, 0.0, adapters=n) for n in (adapters, 0)
    )
    assert 4 * layer == pytest.approx(4 * whole * 2 / 3 + 6 * adapters)
    assert head == whole_head * 2 / 3
    again, _ = flops_per_token(shape, 0.0, adapters=adapters, again=True)
    assert 4 * again == pytest.approx(4 * whole + 8 * adapters)
    assert flops_per_token(shape, 100.0, again=True)[0] == pytest.approx(
        flops_per_token(shape, 100.0)[0] * 4 / 3
    )


def test_meshes_of_four_gpus_by_hand():
    """Two heads of keys, two layers, no experts: tensor x context <= 2, pipeline <= 2."""
    policy = model_of(tiny_config("qwen3", num_attention_heads=4))
    sizes = Sizes(place=GPU, policy=policy)
    run = Footprint(sizes=sizes, config=Config(), command="train", longest=20)
    meshes = [on.mesh for on in possible_meshes(run, 4)]
    found = {(m.data, m.tensor, m.context, m.pipeline) for m in meshes if not m.shard}
    assert found == {
        (4, 1, 1, 1),
        (2, 2, 1, 1),
        (2, 1, 2, 1),
        (2, 1, 1, 2),
        (1, 2, 1, 2),
        (1, 1, 2, 2),
    }
    assert why_refused(run.on(Parallel(tensor=3))) == (
        "parallel.tensor = 3, model.path: 4 attention heads, 2 key/value heads, "
        "172 inner features, expected multiples of 3"
    )


def test_a_larger_model_needs_more_gpus_and_plans_are_sorted_by_time(home):
    run = run_of(home, "rollout.cache_mb=1")
    found = plans(run, 4, H200)
    assert [plan.times.total for plan in found] == sorted(plan.times.total for plan in found)
    less = replace(H200, memory=(sum(run.of_rank_0().values()) - 1) / MEMORY)
    assert smallest(run, less) > 1


def test_a_model_that_fits_once_divided_must_fit_while_it_is_loaded(home):
    run = run_of(home, "rollout.cache_mb=1", "rl.kl_coef=0.1").on(Parallel(data=2))
    policy, held = run.sizes.policy, memory(run.work, run.mesh)["weights"]
    # the policy in parts, the engine's copy of it, and the reference before it is divided
    assert run.loading() == held + 2 * 2 * policy.count + 4 * largest_layer(policy.shape)
    others = {"model.reference": Model(shape=policy.shape, count=10**9)}
    huge = replace(run, sizes=replace(run.sizes, others=others))
    small = replace(H200, memory=1.9e9 / MEMORY)  # the reference has 2 GB
    assert sum(huge.on(Parallel(data=4)).of_rank_0().values()) < 1.9e9
    assert not plans(huge, 4, small)
    assert plans(huge, 4, H200)


def test_meshes_that_train_refuses_are_not_suggested(home):
    def meshes(run, count=16):
        return [plan.mesh for plan in plans(run, count, H200)]

    by_megatron = meshes(run_of(home, "train.backend=megatron", "rl.correction=tis"))
    run = run_of(home)
    assert by_megatron and not any(mesh.shard for mesh in by_megatron)
    assert any(mesh.shard for mesh in meshes(run))
    critic = model_of(tiny_config("qwen3", num_attention_heads=3))
    three_heads = replace(run, sizes=replace(run.sizes, others={"critic.path": critic}))
    assert "tensor=2" not in [mesh.mesh for mesh in meshes(three_heads, 2)]


def test_a_mesh_divides_the_state_of_other_optimizers_too(home):
    """Muon has one moment, 8 bits the bytes of one process."""
    muon, in_8bit = (run_of(home, f"train.optimizer={name}") for name in ("muon", "adamw_8bit"))
    whole, halves = muon.of_rank_0(), muon.on(Parallel(data=2)).of_rank_0()
    assert 2 * halves["Muon momentum"] == whole["Muon momentum"] > 0
    whole, halves = in_8bit.of_rank_0(), in_8bit.on(Parallel(data=2)).of_rank_0()
    assert whole["Adam moments"] == 2 * halves["Adam moments"] > 0
    meshes = [plan.mesh for plan in plans(in_8bit, 4, H200)]
    assert meshes and all(mesh.tensor == 1 for mesh in meshes)


def test_rank_0_has_no_whole_copy_of_a_critic_nor_a_reference_of_its_own_beside_adapters(home):
    run = run_of(home, "rl.algorithm=ppo").on(Parallel(data=2))
    found = run.of_rank_0()
    assert found["whole weights of rank 0"] == 2 * run.sizes.policy.count
    assert found["critic"] == (4 + 12) * run.sizes.others["critic.path"].count / 2
    run = run_of(home, "rl.kl_coef=0.1", "lora.rank=2").on(Parallel(data=2))
    assert "reference" not in run.of_rank_0()


def test_plan_of_gpus_names_what_it_assumes(home):
    output = output_of("plan", home / "recipe.toml", "--gpus", "4", "--gpu", "h100")
    text = " ".join(output.split())
    assert "4 x H100 SXM: 989 TFLOP/s" in text and "assumed: 40% of peak FLOP/s" in text
    assert "seconds" in text and "the first one: parallel." in text
