"""The streams of a run without a data plane: rank 0 keeps the groups of a step, and the other ranks
read the journal: stream.kind = memory."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.choices import Report, StreamBackend
from tandem.config.schema import Config
from tandem.rollout.stream import MemoryStream, Plan, Stream
from tandem.runtime.errors import UserError
from tandem.types import Group

if TYPE_CHECKING:
    from tandem.run_folder.journal import Journal
    from tandem.trainer.ranks import Ranks


class Memory(StreamBackend):
    """The memory of rank 0. No rank joins it."""

    def open(
        self, config: Config, ranks: "Ranks", report: Report
    ) -> AbstractContextManager[Stream]:
        return nullcontext(MemoryStream())


class JournalStream:
    """The stream of a rank after 0 without a data plane: the file that rank 0 has written."""

    def __init__(self, journal: "Journal", folder: Path):
        self.journal, self.folder = journal, folder

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        """Read the groups of a step. Raises UserError if its file is not there."""
        recorded = self.journal.read(step + 1)
        if recorded is None:
            raise UserError(
                "a rank cannot read what rank 0 has written",
                where=str(self.folder / "episodes"),
                found=f"no file of this run for step {step + 1}",
                expected="one run folder for all ranks, on a shared file system",
                next="share it, or stream.kind=transfer_queue",
            )
        return recorded[0]
