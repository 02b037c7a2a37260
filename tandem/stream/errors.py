"""The UserErrors of a stream, for those that have not imported its library."""

from tandem.runtime.errors import UserError


def no_transfer_queue(missing: str | None) -> UserError:
    """Report that a package is missing."""
    return UserError(
        "the package transferqueue is not installed",
        where="stream.kind = transfer_queue",
        found=f"no {missing}",
        expected="TransferQueue and Ray",
        next="pip install 'tandem-rl[transfer-queue]', or stream.kind=memory",
    )
