"""Rollouts by OpenAI-compatible servers: rollout.engine = "http://HOST:PORT/v1", or several.

Commands that only generate take any server that returns token ids and log-probs. `tandem train` and
`tandem distill` need Tandem's own (`tandem serve MODEL --allow-weight-updates`): each version of
the weights is written to a file, which every server loads and hashes, so the file must be on a disk
that they share.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer
from tandem.engine.engine import Engine
from tandem.engine.http import HttpEngines
from tandem.engine.packed import packed_gap
from tandem.jobs.models import check_tokenizer
from tandem.model.config_file import check_model
from tandem.model.rope import positions_of
from tandem.rollout.score import RolloutRunner
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError
from tandem.types import Row, Sync
from tandem.weights.hashing import weight_hash
from tandem.weights.in_process import weights_gone

Report = Callable[[str], None]


def is_http(config: Config) -> bool:
    return config.rollout.engine.startswith(("http://", "https://"))


def load_http_engines(config: Config, renderer: ChatRenderer, report: Report) -> HttpEngines:
    """Connect to the servers of rollout.engine. Raises UserError if none answers."""
    shape = check_model(config.model.path)
    check_tokenizer(config, shape, renderer)
    engines = HttpEngines(
        [url.strip() for url in config.rollout.engine.split(",")],
        renderer.decode,
        longest=positions_of(shape),
        max_batch=config.rollout.max_batch,
        deadline_s=config.run.stall_s / 2,  # before the watchdog ends the run
        restarts=config.rollout.restarts,
        report=report,
    )
    for server in engines.serving:
        if server.served is not None and not server.served.is_tandem:
            report(f"{server} is not Tandem's: log-probs are as it defines them")
    return engines


def require_starting_weights(engines: HttpEngines) -> None:
    """Raise UserError if a server still has the weights of a training, which are not those of the
    model that a command evaluates."""
    for server in engines.serving:
        if server.served is not None and server.served.version:
            raise UserError(
                "the server has weights that a training has sent to it",
                where=f"rollout.engine = {server.url}",
                found=f"version {server.served.version} of them",
                expected="the weights that it was started with",
                next="start `tandem serve` again with the model to evaluate",
            )


@contextmanager
def open_http_rollouts(
    config: Config, engine: Engine, local: RolloutRunner, report: Report, folder: Path
) -> Iterator[tuple[RolloutRunner, Sync, Callable[[], None]]]:
    """Open servers for training, as jobs/engines.py::open_rollouts does. folder: for weights."""
    renderer = local.renderer
    assert isinstance(renderer, ChatRenderer)
    with closing(load_http_engines(config, renderer, report)) as engines:
        for server in engines.servers:
            if server.served is not None and not server.served.takes_updates:
                raise _foreign_weights(server.url, server.served.is_tandem)
        sync = FileSync(engines, engine, folder, config.rollout.staleness)
        try:
            yield replace(local, engine=engines), sync, engines.close
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
        self.hashes[version] = weight_hash(weights)
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

    def traffic(self) -> Row:
        """Return 0 bytes, as servers read files."""
        return {"sync_bytes": 0}

    def logprob_gap(self) -> float:
        """Return the gap of a completion of the servers to the model of `engine`; 0 if that has
        newer weights."""
        version = self.servers.weight_version
        if self.servers.to_check is None or version != self.engine.weight_version:
            return 0.0
        request, completion = self.servers.to_check
        return packed_gap(self.engine.model, request, completion, version)

    def _path(self, version: int) -> Path:
        return self.folder / f"version_{version:06d}.safetensors"


def _foreign_weights(url: str, is_tandem: bool) -> UserError:
    return UserError(
        "the new weights of a training cannot reach this server",
        where=f"rollout.engine = {url}",
        found="it keeps its weights" if is_tandem else "a server that is not Tandem's",
        expected="`tandem serve MODEL --allow-weight-updates`",
        next="train with that, or with rollout.engine=vllm; `tandem rollout` and `tandem eval` can "
        "use this one",
    )
