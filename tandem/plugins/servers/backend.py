"""OpenAI-compatible servers as a choice of what samples. They may be other machines, with other
operators; rollouts.py opens them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tandem.choices import Report, RolloutBackend
from tandem.config.schema import Config
from tandem.types import Generate, ParityCheck

if TYPE_CHECKING:
    from tandem.data.renderer import ChatRenderer
    from tandem.jobs.rollouts import Rollouts, RolloutStage


class Servers(RolloutBackend):
    """Servers of token ids and log-probs; training needs Tandem's own, which take its weights."""

    shares_files = False
    multiplies_here = False

    def conflicts(self, config: Config) -> Iterator[str]:
        if config.rollout.workers:
            yield "rollout.workers: processes of this machine, and the engine is servers"

    def agrees(self, config: Config) -> bool:
        return config.rl.correction == "none"

    def parity(self, config: Config, exact: bool, inexact: str) -> ParityCheck:
        from tandem.plugins.servers.rollouts import ExactServers
        from tandem.trainer.parity import MeasuredGap

        measured = MeasuredGap(config, self.where(config))
        return ExactServers(measured) if exact else measured

    def open(self, stage: "RolloutStage") -> AbstractContextManager["Rollouts"]:
        from tandem.plugins.servers.rollouts import open_servers

        return open_servers(stage)

    def load(self, config: Config, renderer: "ChatRenderer", report: Report) -> Generate:
        from tandem.plugins.servers.rollouts import load_servers

        return load_servers(config, renderer, report)
