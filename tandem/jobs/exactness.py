"""Agreement of engine and trainer to the last bit, by the choices of a config, the model and the
probe; and the off-policy correction that a run needs where there is none."""

from tandem.choices import engine_of, why_gap
from tandem.config.schema import Config
from tandem.model.probe import Exactness
from tandem.runtime.errors import UserError
from tandem.types import ParityCheck


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


def require_parity(config: Config, found: Exactness) -> ParityCheck:
    """Return how engine and trainer are compared; raise UserError if they do not agree on this
    machine, as they should, and the config has no off-policy correction."""
    engine, agrees = engine_of(config), not why_gap(config, found.inexact)
    if agrees and found.parity and config.rl.correction == "none":
        raise UserError(
            "engine and trainer do not agree bit for bit on this machine",
            where="exactness probe",
            found="; ".join(found.parity),
            expected="every operator exact, or an off-policy correction",
            next="add rl.correction=tis (truncated importance sampling); if it is MKL's mode: "
            "unset MKL_CBWR, and in a notebook call tandem.runtime.numerics.prepare() before "
            "anything is computed",
        )
    exact = agrees and not found.parity and engine.agrees(config)
    return engine.parity(config, exact, found.inexact)
