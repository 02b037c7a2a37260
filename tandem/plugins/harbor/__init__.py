"""Harbor's tasks (Terminal-Bench and others) in the sandbox: the environment `harbor`.

For anyone who has tasks as folders (task.toml, instruction.md, environment/, tests/test.sh) and no
place for containers. The rows leave out what cannot be played here:

    tandem generate harbor:FOLDER --out tasks.jsonl
    tandem train my.toml env=harbor reward=env env.timeout_s=900 env.on_error=zero

The model's one tool is `bash`: in bubblewrap without a network, in the Dockerfile's WORKDIR, with
this machine's /usr. Files in /app, /root, /workspace and /tmp stay from command to command,
processes do not. A turn without a call is the end: tests/test.sh runs on those files, and writes
the reward to /logs/verifier/reward.txt or reward.json; if not, it is an error (env.on_error). At a
limit of turns or tokens no test runs, and the reward is 0.

A command can forge its own exit code, output and files, but not the tests, which have a run of
their own. A program of the model's that the tests start can write the reward, as in Harbor.

Of a Dockerfile, WORKDIR and COPY are done; `env.options.skip_run = true` passes over RUN. A task
that needs more (several containers or steps, a GPU) needs Harbor itself. Tests that install what
they need, as many do, give 0 here: try each task first. It plugs in as envs and sources of
tandem/registry.py. The package harbor is not needed.
"""

import base64
import io
import json
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import Any

from tandem.config.episodes import Sandbox
from tandem.envs.calls import in_thread
from tandem.envs.tools import ToolEnv, ToolUnavailable
from tandem.registry import find
from tandem.runtime.errors import UserError
from tandem.types import Message, Observation, Problem

FOLDERS = "app", "root", "workspace", "logs"  # of the sandbox, beside /tmp and /tests
SIZES = {"memory_mb": 2048, "disk_mb": 64, "file_mb": 64, "output_bytes": 2**27, "processes": 256}
HERE = Sandbox()
open_sandbox = cache(lambda config: find("sandboxes", config.kind, key="sandbox")(config))
# The files are unpacked before a command, and packed behind it: between commands nothing runs. They
# may be a forged tar: the output is opened before them, and the tests come after them, from stdin.
RUN = """
[ "$HOME" = /tmp ] && [ -w /app ] && mkdir -p "$1" && cd "$1" || exit 3
exec 3>/tmp/.tandem.out 4<&0 </dev/null
base64 -d /tmp/.tandem | tar xz -C / app root workspace logs tmp
timeout -k 1 "$2" bash -c "$3" >&3 2>&1 3>&-
echo $?
head -c 65536 /dev/fd/3 | base64 -w0; echo
tar cz -C / --ignore-failed-read --exclude='tmp/.tandem*' app root workspace logs tmp | base64 -w0
"""
TEST = """
chmod -R u+rwX /logs
rm -rf /logs/verifier && mkdir /logs/verifier || exit
base64 -d <&4 | tar xz -C /
bash /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1
cd /logs/verifier && exec 2>/dev/null
cat reward.json || cat reward.txt || echo no reward: $(tail -c 500 test-stdout.txt)
"""


class HarborEnv(ToolEnv):
    """One episode of a task. Parts: those of ToolEnv, and the rewards that the tests name."""

    def __init__(
        self, *, sandbox: Sandbox = HERE, skip_run: bool = False, seconds: int = 60, **options: Any
    ):
        """Take the options. seconds: that a command may take; others are ToolEnv's."""
        super().__init__(self.bash, **options)
        self._sandbox, self._skip_run, self._seconds = open_sandbox(sandbox), skip_run, seconds

    async def reset(self, problem: Problem) -> Sequence[Message]:
        self._task = Path(problem.metadata["task"]).resolve()
        self._workdir, self._files = _environment(self._task, self._skip_run)
        return problem.messages

    def bash(self, command: str) -> str:
        """Runs a command in bash and returns what it prints, and its exit code if that is not 0.

        Args:
            command: The command. It begins in the task's folder; files stay, processes do not.
        """
        code, out = self._run(command, self._seconds)
        return out if code == "0" else f"{out}\n(exit code {code})".lstrip("\n")

    async def step(self, text: str) -> Observation:
        observation = await super().step(text)
        if not observation.done:
            return observation
        settings = tomllib.loads((self._task / "task.toml").read_text()).get("verifier", {})
        tests = _packed({PurePosixPath("tests"): self._task / "tests"})
        seconds = settings.get("timeout_sec", 600.0)
        _, out = await in_thread(partial(self._run, TEST, seconds, tests))
        try:
            written = json.loads(out)
            named = written if isinstance(written, dict) else {"reward": written}
            parts = {name: float(value) for name, value in named.items()}
            reward = parts.get("reward", fmean(parts.values()))
        except (ValueError, TypeError):
            raise RuntimeError(f"the tests of {self._task.name} leave no reward: {out}") from None
        return replace(observation, reward=reward, parts={**observation.parts, **parts})

    def _run(self, script: str, seconds: float, stdin: str = "") -> tuple[str, str]:
        """Return a script's exit code and output; the files are then as it leaves them."""
        times = {"wall_s": seconds + 30, "cpu_s": int(seconds) + 30}
        limits = replace(self._sandbox.limits, folders=(*FOLDERS, "tests"), **SIZES, **times)
        words = ["bash", "-c", RUN, "bash", self._workdir, str(seconds), script]
        result = self._sandbox.run(
            words, files={".tandem": self._files}, stdin=stdin, limits=limits
        )
        if result.exit_code == 3:
            raise ToolUnavailable(f"the sandbox has no {self._workdir}: {self._sandbox.state()}")
        if result.exit_code != 0:
            return result.stop_reason, ""
        code, out, self._files = result.stdout.split("\n")
        return code, base64.b64decode(out).decode(errors="replace").rstrip("\n")


def rows(id: str, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield those of the first `limit` tasks below a folder that can be played, as rows."""
    for file in sorted(Path(id).resolve().glob("**/task.toml"))[:limit]:
        with suppress(UserError):
            _environment(file.parent, skip_run=True)
            row = {"uid": file.parent.name, "prompt": file.with_name("instruction.md").read_text()}
            yield row | {"answer": "", "task": str(file.parent)}


def _environment(folder: Path, skip_run: bool) -> tuple[str, str]:
    """Return a task's working directory, and its first files packed. Raises UserError."""
    task, place = tomllib.loads((folder / "task.toml").read_text()), folder / "environment"
    needs: list[Any] = [*place.glob("*compose*"), *folder.glob("steps")]
    needs += ["gpus"] * bool(task.get("environment", {}).get("gpus"))
    workdir, files = PurePosixPath("/app"), dict[PurePosixPath, Path]()
    text = "".join(file.read_text() for file in place.glob("Dockerfile")) or "no Dockerfile"
    for line in text.replace("\\\n", " ").splitlines():
        match line.split():
            case ["WORKDIR", name]:
                workdir /= name
            case ["COPY", *sources, target] if sources[0][0] not in "-[":
                for path in (place / source for source in sources):
                    inside = path.is_file() and (target[-1] in "/." or len(sources) > 1)
                    files[workdir / target / (path.name if inside else "")] = path.resolve()
            case [word, *_] if not word.startswith(("FROM", "#", "RUN" if skip_run else "#")):
                needs.append(line)
    needs += [name for name in (workdir, *files) if "".join(name.parts[1:2]) not in FOLDERS]
    needs += [path for path in files.values() if not (path.exists() and path.is_relative_to(place))]
    if needs:
        what, next = "a task needs a container", "Harbor's own runner, or env.options.skip_run"
        raise UserError(what, where=str(folder), found=str(needs[0]), next=next)
    return str(workdir), _packed(files)


def _packed(files: Mapping[PurePosixPath, Path]) -> str:
    """Pack files and folders into a tar without times, as base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, path in files.items():
            tar.add(path, str(name), filter=lambda info: info.replace(mtime=0))
    return base64.b64encode(packed.getvalue()).decode()
