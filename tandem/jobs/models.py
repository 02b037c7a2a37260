"""Models, critics and references of a command, from its config."""

from typing import Any, Literal

from tandem.config.schema import SFT, Config, Preference, Train
from tandem.data.renderer import ChatRenderer
from tandem.model.config_file import check_model
from tandem.model.load import ExactModel, load_model
from tandem.model.lora import Lora, require_peft
from tandem.model.placement import Placement, place_models
from tandem.model.weight_files import check_weights
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address
from tandem.train.batch import Models
from tandem.train.learner import Learner
from tandem.train.offload import BUCKET
from tandem.train.optimizer import Optimizer

Head = Literal["tokens", "value"]


def placement(config: Config) -> Placement:
    """Resolve model.device and model.dtype. Raises UserError for a device that is not there."""
    return place_models(config.model.device, config.model.dtype)


def releases_cache(config: Config, place: Placement) -> bool:
    """Tell whether the engine's cache gives its memory to the updates (rollout.release_cache)."""
    release = config.rollout.release_cache
    return place.device.type == "cuda" if release == "auto" else release


def build_model(config: Config, path: str, *, head: Head = "tokens") -> ExactModel:
    """Load a model to train, with the config's adapters and activation checkpointing."""
    lora = config.lora
    adapters = Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(lora.targets),
        seed=address(config.run.seed, "lora") >> 1,
    )
    place = placement(config)
    model = load_model(path, adapters if lora.rank else None, head=head, place=place)
    model.checkpointing = config.train.activation_checkpointing
    return model


def build_learner(
    config: Config, model: ExactModel, rates: Train | SFT | Preference, steps: int
) -> Learner:
    """Give the model its AdamW. rates: the section with learning rate, schedule and warm-up; all
    else is in [train]."""
    optimizer = Optimizer(
        model.trainable(),
        learning_rate=rates.learning_rate,
        schedule=rates.schedule,
        warmup_steps=rates.warmup_steps,
        total_steps=steps,
        weight_decay=config.train.weight_decay,
        betas=(config.train.beta1, config.train.beta2),
        max_grad_norm=config.train.max_grad_norm,
        offload_bucket=BUCKET if config.train.offload_optimizer else 0,
    )
    return Learner(model, optimizer)


def build_reference(config: Config, policy: ExactModel) -> ExactModel:
    """Return the frozen model of KL and DPO: the named one, the policy without its adapters, or the
    starting weights."""
    if config.lora.rank and not config.model.reference:
        return policy
    return load_model(config.model.reference or config.model.path, place=placement(config))


def build_rl_models(config: Config) -> Models:
    """Build the policy, and critic and reference if the algorithm has them."""
    updates = config.rl.minibatches * config.rl.epochs
    has_critic = config.rl.advantage == "gae"
    warmup = config.critic.warmup_steps if has_critic else 0
    model = build_model(config, config.model.path)
    policy = build_learner(config, model, config.train, (config.run.steps - warmup) * updates)
    reference = build_reference(config, model) if config.rl.kl_coef else None
    if not has_critic:
        return Models(policy=policy, reference=reference)
    values = build_model(config, config.critic.path or config.model.path, head="value")
    rates = config.train.model_copy(update={"learning_rate": config.critic.learning_rate})
    critic = build_learner(config, values, rates, config.run.steps * updates)
    return Models(policy=policy, reference=reference, critic=critic)


def build_distill_models(config: Config) -> Models:
    """Build the student, and load its teacher."""
    steps = config.run.steps * config.rl.minibatches * config.rl.epochs
    student = build_learner(config, build_model(config, config.model.path), config.train, steps)
    teacher = load_model(config.distill.teacher, place=placement(config))
    return Models(policy=student, teacher=teacher)


def check_models(config: Config, *others: str, head: Head = "tokens") -> Any:
    """Check, before any weights are loaded, that model.path and the models that the other keys name
    are there, exact, and of one vocabulary. Returns the transformers config of model.path."""
    placement(config)
    shape = check_model(config.model.path, head=head)
    check_weights(config.model.path)
    for key in others:
        section, field = key.split(".")
        if path := getattr(getattr(config, section), field):
            kind: Head = "value" if key == "critic.path" else "tokens"
            size = check_model(path, key, head=kind).vocab_size
            if size != shape.vocab_size:
                raise _other_vocabulary(key, path, size, shape.vocab_size)
            check_weights(path)
    if config.lora.rank:
        require_peft()
    return shape


def check_tokenizer(config: Config, shape: Any, renderer: ChatRenderer) -> None:
    """Raise UserError if the tokenizer has tokens that the model lacks."""
    if len(renderer.tokenizer) > shape.vocab_size:
        raise UserError(
            "the tokenizer is not this model's",
            where=f"model.path = {config.model.path}",
            found=f"{len(renderer.tokenizer):,} tokens",
            expected=f"at most {shape.vocab_size:,}",
        )


def _other_vocabulary(key: str, path: str, found: int, expected: int) -> UserError:
    return UserError(
        "two models do not share a vocabulary",
        where=f"{key} = {path}",
        found=f"{found:,} tokens",
        expected=f"{expected:,}, as model.path",
        next="take a model of the same family",
    )
