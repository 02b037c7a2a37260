"""The UserErrors of the pool of rollout workers, and of whatever dispatches requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.runtime.errors import InvariantError, UserError
from tandem.types import Completion

if TYPE_CHECKING:  # it imports this
    from tandem.engine.worker_pool.dispatch import Ticket


def too_long(needed: int, longest: int) -> UserError:
    """Report a request of that many tokens, prompt and completion."""
    return UserError(
        "a sequence would be longer than an engine can hold",
        where="rollout.max_new_tokens",
        found=f"{needed} tokens, prompt and completion",
        expected=f"at most {longest}, by the model's positions and the engine's cache",
        next="lower rollout.max_new_tokens, or raise rollout.cache_mb (of servers: tandem serve "
        "--cache-mb)",
    )


def no_restart_left(limit: int, lost: str, last_words: str) -> UserError:
    """Report one lost worker too many."""
    return UserError(
        "rollout workers end again and again",
        where=lost,
        found=last_words,
        expected=f"at most {limit} restarts in a run (rollout.restarts)",
        next="look at what the worker wrote last; the same command resumes the run",
    )


def other_weights(where: str, names: Sequence[str], found: str, expected: str) -> UserError:
    """Report a worker whose weights have another hash than the trainer's; names: of tensors."""
    return UserError(
        "the engine's weights differ from the trainer's",
        where=f"{where}: {', '.join(names)}" if names else where,
        found=found,
        expected=expected,
        next="no token was sampled with them; the same command resumes the run",
    )


def check_completion(where: str, ticket: "Ticket", identity: str, completion: Completion) -> None:
    """Raise an error for a completion of another request, or by weights of another version."""
    if identity != ticket.identity:
        raise InvariantError(
            "a completion was made for another request",
            where=where,
            found=identity,
            expected=ticket.identity,
            next="a bug: it is not trained; please report it",
        )
    paused, expected = ticket.request.resume_from, ticket.queue.version
    versions = completion.weight_versions[0 if paused is None else len(paused.tokens) :]
    if (versions != expected).any():
        raise UserError(
            "a completion was sampled by other weights than those applied",
            where=where,
            found=f"tokens of version {sorted(set(versions.tolist()))}",
            expected=f"version {expected}",
        )
