"""The UserErrors of a Ray cluster and of what runs on it, for those that have not imported it."""

from collections.abc import Mapping

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


def too_small(address: str, found: int, expected: int) -> UserError:
    """Report a joined cluster with fewer living nodes than the config says."""
    return UserError(
        "the Ray cluster is smaller than the config says",
        where=f"cluster.address = {address}",
        found=f"{found} living nodes",
        expected=f"cluster.nodes = {expected}",
        next="start the other nodes (`ray start --address=...`), or lower cluster.nodes",
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


def not_started(error: Exception) -> UserError:
    """Report a cluster that cannot be started."""
    return UserError(
        "Ray does not start on this machine",
        where="cluster.nodes",
        found=str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
        expected="a node within 30 s, in three tries",
        next="try again when the machine is less busy, or cluster.nodes=0",
    )


def no_room_for_ranks(count: int, each: Mapping[str, float], found: str) -> UserError:
    """Report a cluster without room for the trainer's ranks. found: what its nodes have free."""
    needs = " and ".join(f"{amount:g} {what}" for what, amount in each.items())
    return UserError(
        "the Ray cluster has no room for the trainer's ranks",
        where="cluster.trainers = ray",
        found=found,
        expected=f"{needs} for each of {count} ranks after rank 0",
        next="look with `ray status`; free some, start other nodes, or cluster.trainers=driver",
    )


def workers_lost(role: str, count: int, lost: str, last_words: str) -> UserError:
    """Report workers of a role that were lost one after the other. lost: the last one, and how."""
    return UserError(
        f"{count} {role}s were lost in a row, and none has answered",
        where=_key(role),
        found=f"{lost}\n{last_words}".rstrip(),
        expected=f"nodes on which a {role} lives",
        next=f"look at that node's memory and logs, or leave it to the driver: {_key(role)}=0",
    )


def no_working_directory(role: str, folder: str, error: OSError) -> UserError:
    """Report a node without the run's working directory, where a user's code is looked for."""
    return UserError(
        f"the {role} does not find the run's working directory",
        where=_key(role),
        found=f"{folder}: {error.strerror}",
        expected="the directory that the run was started in, at the same path on every node",
        next=f"mount it there, or leave it to the driver: {_key(role)}=0",
    )


def _key(role: str) -> str:
    return f"cluster.{role.replace(' ', '_')}s"
