"""The UserErrors of engines behind servers (http.py)."""

from collections.abc import Mapping

from tandem.runtime.errors import UserError


def none_left(reasons: Mapping[str, str], deadline_s: float) -> UserError:
    """Report that all servers are lost. reasons: by URL."""
    return UserError(
        "none of the servers answers",
        where=", ".join(reasons),
        found="; ".join(f"{url}: {reason}" for url, reason in reasons.items()),
        expected=f"one that answers within {deadline_s:g} s",
        next="start one: tandem serve MODEL --port PORT",
    )


def lost_too_often(url: str, reason: str, limit: int) -> UserError:
    """Report one loss too many, of that server."""
    return UserError(
        "servers are lost again and again",
        where=url,
        found=reason,
        expected=f"at most {limit} losses in a run (rollout.restarts)",
        next="look at what the server wrote last; the same command resumes the run",
    )


def other_weights(url: str, found: tuple[int, str], expected: tuple[int, str]) -> UserError:
    """Report a server of other weights than the run's. found, expected: version and hash."""
    return UserError(
        "the rollout servers do not run the same weights",
        where=url,
        found=f"version {found[0]}, hash {found[1][:16]}",
        expected=f"version {expected[0]}, hash {expected[1][:16]}",
        next="serve one model directory on all of them, and to this run alone",
    )
