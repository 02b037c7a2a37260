"""Models, critics and references of a command, from its config."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from tandem.choices import choices, machine_of, trainer_of
from tandem.config.schema import Config
from tandem.config.training import SFT, Preference, Train
from tandem.data.renderer import ChatRenderer
from tandem.model.config_file import LEAN_ARCHITECTURES, check_model, has_experts
from tandem.model.load import ExactModel, load_model
from tandem.model.paths import divisible, path_of, reads_more_than_text
from tandem.model.placement import Placement, place_models
from tandem.model.stock import check_weights
from tandem.registry import find
from tandem.runtime.errors import UserError
from tandem.runtime.place import here
from tandem.runtime.rng import address
from tandem.trainer.batch import Models
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from tandem.model.lora import Lora

Head = Literal["tokens", "value"]


def placement(config: Config) -> Placement:
    """Resolve model.device and model.dtype, for this process of `parallel`. Raises UserError for a
    device that is not there."""
    place = place_models(config.model.device, config.model.dtype)
    if place.device.type == "cuda" and config.parallel.processes > 1:
        from tandem.trainer.parallel.checks import own_gpu

        own = machine_of(config).own_place(config, here(os.environ, config.parallel.processes))
        number = own_gpu(config.model.device, own, torch.cuda.device_count())
        return replace(place, device=torch.device("cuda", number))
    return place


def releases_cache(config: Config, place: Placement) -> bool:
    """Tell whether the engine's cache gives its memory to the updates (rollout.release_cache)."""
    release = config.rollout.release_cache
    return place.device.type == "cuda" if release == "auto" else release


def build_model(
    config: Config, path: str, ranks: Ranks = ALONE, *, head: Head = "tokens"
) -> ExactModel:
    """Load a model to train, with the config's adapters and activation checkpointing, and divide it
    among the ranks."""
    place = placement(config)
    model = _load(config, path, place, head)
    model.checkpointing = config.train.activation_checkpointing
    return ranks.divide(model, place.dtype)


def adapter_of(config: Config) -> "Lora | None":
    """Return the adapter of a run's models; None without one."""
    if not (lora := config.lora).rank:
        return None
    from tandem.model.lora import Lora

    return Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(lora.targets),
        seed=address(config.run.seed, "lora") >> 1,
        base=lora.base,
    )


def _load(config: Config, path: str, place: Placement, head: Head) -> ExactModel:
    model = load_model(path, adapter_of(config), head=head, place=place)
    model.split(config.parallel.tensor)
    return model


def build_learner(
    config: Config,
    path: str,
    rates: Train | SFT | Preference,
    steps: int,
    ranks: Ranks = ALONE,
    *,
    name: str = "policy",
    head: Head = "tokens",
) -> Learner:
    """Load a model to train and give it its optimizer. rates: the section with learning rate,
    schedule and warm-up; all else is in [train]; name: of the learner in checkpoints."""
    model = build_model(config, path, ranks, head=head)
    train = config.train
    kind = "offload" if train.offload_optimizer else "optimizers"
    optimizer: Optimizer = find(kind, train.optimizer, key="train.optimizer")(
        ranks.trainable(model),
        Settings(
            learning_rate=float(rates.learning_rate),
            schedule=rates.schedule,
            warmup_steps=rates.warmup_steps,
            total_steps=steps,
            weight_decay=train.weight_decay,
            betas=(train.beta1, train.beta2),
            max_grad_norm=train.max_grad_norm,
            muon_momentum=train.muon_momentum,
        ),
        whole=ranks.pieces(model),
    )
    # nobody runs or exports a whole critic
    has_copy = ranks is not ALONE and ranks.rank == 0 and name != "critic"
    copy = _load(config, path, placement(config), head) if has_copy else None
    return Learner(model, optimizer, ranks, name, copy, config.train.router_aux_loss_coef)


def build_reference(config: Config, policy: ExactModel, ranks: Ranks = ALONE) -> ExactModel:
    """Return the frozen model of KL and DPO: the named one, the policy without its adapters, or the
    starting weights."""
    if config.lora.rank and not config.model.reference:
        return policy
    return load_frozen(config, config.model.reference or config.model.path, ranks)


def load_frozen(config: Config, path: str, ranks: Ranks) -> ExactModel:
    place = placement(config)
    model = load_model(path, place=place)
    model.split(config.parallel.tensor)
    return ranks.divide(model, place.dtype)


def build_rl_models(config: Config, ranks: Ranks = ALONE) -> Models:
    """Build the policy, and critic and reference if the algorithm has them."""
    updates = config.rl.minibatches * config.rl.epochs
    has_critic = config.rl.estimator.needs_critic
    warmup = config.critic.warmup_steps if has_critic else 0
    steps = (config.run.steps - warmup) * updates
    policy = build_learner(config, config.model.path, config.train, steps, ranks)
    reference = build_reference(config, policy.model, ranks) if config.rl.kl_coef else None
    if not has_critic:
        return Models(policy=policy, reference=reference)
    rates = config.train.model_copy(update={"learning_rate": config.critic.learning_rate})
    path, steps = config.critic.path or config.model.path, config.run.steps * updates
    critic = build_learner(config, path, rates, steps, ranks, name="critic", head="value")
    return Models(policy=policy, reference=reference, critic=critic)


def check_models(config: Config, *others: str, head: Head = "tokens") -> Any:
    """Check, before any weights are loaded, that model.path and the models that the other keys name
    are there, can run, and are of one vocabulary. Returns the transformers config of model.path."""
    placement(config)
    trainer_of(config).check(config)
    heads: dict[str, Head] = {"model.path": head, "critic.path": "value"}
    shape = None
    for key in ("model.path", *others):
        section, field = key.split(".")
        path = getattr(getattr(config, section), field)
        if not path and key != "model.path":
            continue
        kind = heads.get(key, "tokens")
        found = check_model(path, key, head=kind)
        shape = shape or found
        size, expected = (_vocabulary(one) for one in (found, shape))
        if size != expected:
            raise UserError(
                "two models do not share a vocabulary",
                where=f"{key} = {path}",
                found=f"{size:,} tokens",
                expected=f"{expected:,}, as model.path",
                next="take a model of the same family",
            )
        check_weights(path)
        check_shape(config, found, key, kind)
        path_of(found, f"{key} = {path}", placement(config))
    if "critic.path" in others and not config.critic.path:
        _check_scored(shape, "model.path")
    if config.lora.rank:
        from tandem.model.lora import require_peft

        require_peft()
    set_keys = {
        "train.router_aux_loss_coef=0": config.train.router_aux_loss_coef,
        "rl.router_replay=false": config.rl.router_replay,
    }
    off = " ".join(key for key, value in set_keys.items() if value)
    if off and not (divisible(shape) and has_experts(shape)):
        raise UserError(
            "there are no experts to balance, or whose choice to replay",
            where="model.path",
            found=f"{config.model.path}, without experts, or whose experts are transformers' own",
            expected="a mixture of experts that runs through Tandem's layer, as qwen3_moe",
            next=f"set {off}",
        )
    return shape


def check_shape(config: Config, shape: Any, key: str, head: Head = "tokens") -> None:
    """Raise UserError if the mesh cannot divide a model of this transformers config, or its backend
    cannot train it. key: that names the model."""
    processes, trainer = config.parallel.processes, trainer_of(config)
    if not divisible(shape) and (processes > 1 or not trainer.runs_alone):
        raise UserError(
            "this architecture trains in one process",
            where=f"{key}, architecture {shape.model_type}",
            found=f"{processes} processes" if processes > 1 else trainer.where(config),
            expected=f"one of {', '.join(LEAN_ARCHITECTURES)} for others",
            next="leave [parallel] and train.backend out",
        )
    check_parts(config, shape, key)
    if head == "value":
        _check_scored(shape, key)
    if processes > 1:
        from tandem.trainer.parallel.checks import check_mesh

        check_mesh(config.parallel, shape, key)
    for choice in choices(config):
        choice.check_model(config, shape, key, head)


def check_parts(config: Config, shape: Any, key: str = "model.path") -> None:
    """Raise UserError for rollouts that do not find the images of a run."""
    if not reads_more_than_text(shape.model_type):
        return
    if found := [one.where(config) for one in choices(config) if not one.shares_files]:
        raise UserError(
            "a model that reads images samples on this machine, with Tandem's engine",
            where=f"{key}, architecture {shape.model_type}",
            found=found[0],
            expected="Tandem's engine, without a cluster",
            next=f"leave {found[0].split()[0]} out",
        )


def _check_scored(shape: Any, key: str) -> None:
    """Raise UserError for an architecture that transformers has no sequence classifier of."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    if shape.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(
            "transformers has no value head for this architecture",
            where=f"{key}, architecture {shape.model_type}",
            found="no sequence classifier",
            expected=f"one with a sequence classifier, as {', '.join(LEAN_ARCHITECTURES)}",
            next="take a model of another architecture, or an rl.advantage without a critic",
        )


def check_tokenizer(config: Config, shape: Any, renderer: ChatRenderer) -> None:
    """Raise UserError if the tokenizer has tokens that the model lacks."""
    if len(renderer.tokenizer) > _vocabulary(shape):
        raise UserError(
            "the tokenizer is not this model's",
            where=f"model.path = {config.model.path}",
            found=f"{len(renderer.tokenizer):,} tokens",
            expected=f"at most {_vocabulary(shape):,}",
        )


def _vocabulary(shape: Any) -> int:
    return int(shape.get_text_config().vocab_size)
