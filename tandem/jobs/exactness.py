"""Agreement of engine and trainer to the last bit, by the config, the model and the probe; and the
off-policy correction that a run needs where there is none."""

from tandem.config.schema import Config
from tandem.jobs.http_engines import is_http
from tandem.model.probe import Exactness
from tandem.runtime.errors import UserError


def other_kernels(config: Config) -> str:
    """Name the setting by which trainer and rollouts compute with different kernels, or weights, or
    ""."""
    if config.train.backend == "megatron":
        return "train.backend = megatron"
    if config.weights.delta == "int8":
        return "weights.delta = int8"
    return "rollout.engine = vllm" if config.rollout.engine == "vllm" else ""


def why_gap(config: Config, inexact: str) -> str:
    """Say why trainer and rollouts do not agree to the last bit: their kernels, their weights, or a
    model that cannot be exact, which is `inexact`; or ""."""
    return other_kernels(config) or inexact


def require_correction(config: Config, inexact: str = "") -> None:
    """Raise UserError if the trainer computes in another way than the engine (`why_gap`), and the
    config has no off-policy correction."""
    if (where := why_gap(config, inexact)) and config.rl.correction == "none":
        raise UserError(
            "the engine's log-probs are not the trainer's to the last bit",
            where=where,
            found="rl.correction = none",
            expected="an off-policy correction",
            next="add rl.correction=tis (truncated importance sampling)",
        )


def require_parity(config: Config, found: Exactness) -> bool:
    """Return whether engine and trainer agree; raise UserError if they do not and the config has no
    off-policy correction."""
    if why_gap(config, found.inexact):
        return False
    if is_http(config) and config.rl.correction != "none":
        return False  # the servers may be other machines
    if found.parity and config.rl.correction == "none":
        raise UserError(
            "engine and trainer do not agree bit for bit on this machine",
            where="exactness probe",
            found="; ".join(found.parity),
            expected="every operator exact, or an off-policy correction",
            next="add rl.correction=tis (truncated importance sampling); if it is MKL's mode: "
            "unset MKL_CBWR, and in a notebook call tandem.runtime.numerics.prepare() before "
            "anything is computed",
        )
    return not found.parity
