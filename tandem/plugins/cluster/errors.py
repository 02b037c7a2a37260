"""Errors of a Ray cluster that several files raise, some without Ray."""

from tandem.runtime.errors import UserError


def last_line(text: str) -> str:
    """Return the last line of what Ray says of an actor's end, without its guesses at causes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].split(" Some common causes")[0] if lines else ""


def no_ray() -> UserError:
    """Report that the package is missing."""
    return UserError(
        "the package ray is not installed",
        where="cluster.nodes",
        found="no ray",
        expected="Ray 2.50 or newer",
        next="pip install 'tandem-rl[ray]', or cluster.nodes=0",
    )


def no_transfer_queue(missing: str | None) -> UserError:
    """Report that a package is missing."""
    return UserError(
        "the package transferqueue is not installed",
        where="stream.kind = transfer_queue",
        found=f"no {missing}",
        expected="TransferQueue and Ray",
        next="pip install 'tandem-rl[transfer-queue]', or stream.kind=memory",
    )


def no_nixl(found: str) -> UserError:
    """Report that the package is missing."""
    return UserError(
        "weights.transport = rdma needs NIXL",
        where="weights.transport",
        found=found,
        expected="the package nixl",
        next="pip install 'tandem-rl[rdma]'",
    )


def not_joined(address: str, found: str) -> UserError:
    """Report a cluster that cannot be joined. found: what Ray says, any number of lines."""
    lines = [line for line in found.splitlines() if line.strip()]
    return UserError(
        "the Ray cluster cannot be joined",
        where=f"cluster.address = {address}",
        found=" ".join(lines[:3])[:300],
        expected="the address that `ray start --head` printed, a node of the cluster on this "
        "machine, and its token (RAY_AUTH_TOKEN, or `ray get-auth-token --generate`)",
        next="look with `ray status`; a cluster without tokens needs RAY_AUTH_MODE=disabled; or "
        "leave cluster.address out for a cluster on this machine",
    )
