"""Inputs and models of `tandem distill`; its job is that of `tandem train` (rl.py)."""

from typing import Any

from tandem.config.schema import Config
from tandem.jobs.inputs import ProblemInputs, missing, problem_inputs
from tandem.jobs.models import build_learner, check_models, load_frozen
from tandem.model.config_file import check_model, logit_softcap
from tandem.model.load import empty_model
from tandem.model.tokenizer import load_tokenizer
from tandem.plugins.distill.update import distill
from tandem.runtime.errors import UserError
from tandem.trainer.batch import Models
from tandem.trainer.ranks import ALONE, Ranks


def distill_inputs(config: Config) -> ProblemInputs:
    """Read and check the inputs of `tandem distill`."""
    if not config.distill.teacher:
        raise missing(
            "no teacher is named", "distill.teacher", "a Hugging Face directory or hub name"
        )
    rl = config.rl
    bonus = rl.entropy_coef and config.distill.estimator == "exact"
    if rl.kl_coef or rl.max_gen_batches or bonus:
        raise UserError(
            "distillation has no reference and no groups to choose from, and its exact divergence "
            "no entropy bonus",
            where="tandem distill",
            found=f"rl.kl_coef = {rl.kl_coef}, rl.max_gen_batches = {rl.max_gen_batches}, "
            f"rl.entropy_coef = {rl.entropy_coef}",
            expected="0 for all",
            next="add rl.kl_coef=0 rl.max_gen_batches=0 rl.entropy_coef=0",
        )
    for key, name in (("rl.loss", rl.loss), ("rl.advantage", rl.advantage)):
        if ":" in name:
            raise UserError(
                "distillation has a loss of its own",
                where=f"{key} = {name}",
                found="a function of yours",
                expected="one of distill.divergence and distill.estimator",
                next=f"drop {key}, or train with `tandem train`",
            )
    shape = check_models(config, "distill.teacher")
    if config.distill.estimator == "exact":
        teacher = config.distill.teacher
        _check_logits(teacher, check_model(teacher, "distill.teacher"), "distill.teacher")
        _check_logits(config.model.path, shape, "model.path")
    if (
        load_tokenizer(config.distill.teacher).get_vocab()
        != load_tokenizer(config.model.path).get_vocab()
    ):
        raise UserError(
            "teacher and student do not read the same tokens",
            where=f"distill.teacher = {config.distill.teacher}",
            found="another tokenizer",
            expected=f"that of {config.model.path}",
            next="take a teacher of the same family",
        )
    return problem_inputs(config, "distill.teacher")


def build_distill_models(config: Config, ranks: Ranks = ALONE) -> Models:
    """Build the student, and load its teacher."""
    steps = config.run.steps * config.rl.minibatches * config.rl.epochs
    student = build_learner(config, config.model.path, config.train, steps, ranks)
    teacher = load_frozen(config, config.distill.teacher, ranks)
    return Models(policy=student, teacher=teacher, own_update=distill)


def _check_logits(path: str, shape: Any, key: str) -> None:
    """Raise UserError for a divergence of a model whose logits are not its last states times the
    output projection alone."""
    softcap = logit_softcap(shape)
    if softcap or empty_model(path, shape).get_output_embeddings().bias is not None:
        raise UserError(
            "no divergence can be computed for this model",
            where=f"{key} = {path}, architecture {shape.model_type}",
            found=f"a soft cap of {softcap}" if softcap else "a bias",
            expected="an output projection without a bias and without a soft cap",
            next="set distill.estimator=sampled",
        )
