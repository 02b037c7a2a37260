"""Rollouts by OpenAI-compatible servers, for backend.py.

Commands that only generate take any server that returns token ids and log-probs. `tandem train` and
`tandem distill` need Tandem's own (`tandem serve MODEL --allow-weight-updates`): each version of
the weights is written to a file, which every server loads and hashes, so the file must be on a disk
that they share.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tandem.choices import ENGINE, Report
from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer
from tandem.engine.engine import Engine
from tandem.jobs.models import check_tokenizer
from tandem.jobs.rollouts import Rollouts, RolloutStage
from tandem.model.config_file import check_model
from tandem.model.rope import positions_of
from tandem.plugins.servers.engines import HttpEngines
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError
from tandem.trainer.batch import TrainBatch
from tandem.trainer.learner import Learner
from tandem.trainer.parity import ExactCheck, MeasuredGap
from tandem.types import Row
from tandem.weights.hashing import weight_hash
from tandem.weights.in_process import weights_gone


@contextmanager
def open_servers(stage: RolloutStage) -> Iterator[Rollouts]:
    """Open servers for training; each version of the weights is a file in the run's folder."""
    renderer, folder = stage.local.renderer, stage.folder / "weights"
    assert isinstance(renderer, ChatRenderer)
    with closing(connect(stage.config, renderer, stage.report)) as engines:
        for server in engines.known:
            if not server.served.takes_updates:
                own = server.served.is_tandem
                raise UserError(
                    "the new weights of a training cannot reach this server",
                    where=f"{ENGINE} = {server.url}",
                    found="it keeps its weights" if own else "a server that is not Tandem's",
                    expected="`tandem serve MODEL --allow-weight-updates`",
                    next="train with that, or with vLLM; `tandem rollout` and `tandem eval` can "
                    "use this one",
                )
        engines.reference = stage.engine
        sync = FileSync(engines, stage.engine, folder, stage.config.rollout.staleness)
        try:
            lane = replace(stage.local, engine=engines), sync
            yield Rollouts(lanes=[lane], stop=engines.close)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def load_servers(config: Config, renderer: ChatRenderer, report: Report) -> HttpEngines:
    """Connect to the servers of a command that only generates. Raises UserError if one still has
    the weights of a training, which are not those of the model that the command evaluates."""
    engines = connect(config, renderer, report)
    for server in engines.serving:
        if server.served.version:
            raise UserError(
                "the server has weights that a training has sent to it",
                where=f"{ENGINE} = {server.url}",
                found=f"version {server.served.version} of them",
                next="start `tandem serve` again with the model to evaluate",
            )
    return engines


def connect(config: Config, renderer: ChatRenderer, report: Report) -> HttpEngines:
    """Connect to the servers. Raises UserError if none answers."""
    shape = check_model(config.model.path)
    check_tokenizer(config, shape, renderer)
    engines = HttpEngines(
        config.rollout.servers,
        renderer.decode,
        longest=positions_of(shape),
        max_batch=config.rollout.max_batch,
        deadline_s=config.run.stall_s / 2,  # before the watchdog ends the run
        restarts=config.rollout.restarts,
        report=report,
    )
    for server in engines.serving:
        if not server.served.is_tandem:
            report(f"{server} is not Tandem's: log-probs are as it defines them")
    return engines


@dataclass(frozen=True)
class ExactServers(ExactCheck):
    """Servers that must agree to the last bit; their mean gap is reported where it is measured."""

    measured: MeasuredGap

    def before_update(self, batch: TrainBatch, policy: Learner, version: int) -> Row:
        return self.measured.before_update(batch, policy, version)


class FileSync:
    """Publication of the weights of `engine`, which evaluates, to servers, by files of a folder.

    keep: how many versions before the newest may still be asked for.
    """

    def __init__(self, servers: HttpEngines, engine: Engine, folder: Path, keep: int):
        self.servers, self.engine, self.folder, self.keep = servers, engine, folder, keep
        self.hashes: dict[int, str] = {}  # by version

    def publish(self, version: int) -> None:
        from safetensors.torch import save_file

        weights: dict[str, Tensor] = self.engine.model.merged_weights()
        whole = {name: weight.contiguous().cpu() for name, weight in weights.items()}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f".tmp-{version}"
            save_file(whole, temporary)
            temporary.rename(self._path(version))
        self.hashes[version] = weight_hash(weights.items())
        for old in [old for old in self.hashes if old < version - self.keep]:
            self._path(old).unlink(missing_ok=True)
            del self.hashes[old]
        self.engine.apply(version)

    def sync_to(self, version: int) -> None:
        """Have the servers run a version. Raises UserError if it is gone, or a server runs other
        weights than it."""
        if version not in self.hashes:
            raise weights_gone(version, found=f"versions {sorted(self.hashes)}")
        path = str(self._path(version).resolve())
        self.servers.load(path, version, self.hashes[version])

    def stats(self) -> Row:
        """Return 0 bytes, as servers read files."""
        return {"sync_bytes": 0}

    def _path(self, version: int) -> Path:
        return self.folder / f"version_{version:06d}.safetensors"
