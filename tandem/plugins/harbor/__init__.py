"""Harbor's tasks (Terminal-Bench and others): the environment `harbor`.

For anyone who has tasks as folders (task.toml, instruction.md, environment/, tests/test.sh):

    tandem generate harbor:FOLDER --out tasks.jsonl
    tandem train my.toml env=harbor reward=env env.timeout_s=900 env.on_error=zero

The model's one tool is `bash`, without a network. A turn without a call is the end: tests/test.sh
writes the reward to /logs/verifier/reward.txt or reward.json; if not, it is an error. At a limit of
turns or tokens no test runs, and the reward is 0. Tests that install what they need give 0, too.

Where `docker` answers, it builds and runs each task; a kill leaves its containers behind. Elsewhere
the sandbox does, with this machine's /usr: a Dockerfile of WORKDIR and COPY; `env.options.skip_run
= true` passes over RUN. Files in /app, /root, /workspace and /tmp then stay from one command to the
next, processes do not. A command can forge its own exit code, output and files, but not the tests.

Several containers or steps, or a GPU, need Harbor itself. It plugs in as envs and sources of
tandem/registry.py. The package harbor is not needed.
"""

import base64
import io
import json
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
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
CONTAINER = "-d --init --network none --memory 2g --pids-limit 256 --entrypoint sleep"
IN_CONTAINER = 'timeout -k 1 "$1" bash -c "$2" 2>&1 | head -c 65536; printf "\n${PIPESTATUS[0]}"'
# The files are unpacked before a command, and packed behind it: between commands nothing runs. They
# may be a forged tar: the tests come after them, from stdin.
IN_SANDBOX = """
[ "$HOME" = /tmp ] && [ -w /app ] && mkdir -p "$3" && cd "$3" || exit 3
base64 -d /tmp/.tandem | tar xz -C / app root workspace logs tmp 2>/dev/null
timeout -k 1 "$1" bash -c "$2" >&2; code=$?
tar cz -C / --exclude=tmp/.tandem app root workspace logs tmp 2>/dev/null | base64 -w0
exit $code
"""
TEST = """
mkdir -p /logs && chmod -R u+rwX /logs && rm -rf /logs/verifier && mkdir /logs/verifier || exit
rm -rf /tests 2>/dev/null; base64 -d | tar xz -C /
bash /tests/test.sh </dev/null >/logs/verifier/test-stdout.txt 2>&1
cd /logs/verifier && exec 2>/dev/null
cat reward.json || sed 's/.*/{"reward": &}/' reward.txt || echo no reward: $(tail test-stdout.txt)
"""


class HarborEnv(ToolEnv):
    """One episode of a task. Parts: those of ToolEnv, and the rewards that the tests name."""

    def __init__(
        self, *, sandbox: Sandbox = HERE, skip_run: bool = False, seconds: int = 60, **options: Any
    ):
        """Take the options. seconds: that a command may take; others are ToolEnv's."""
        super().__init__(self.bash, **options)
        self._sandbox = None if _has_docker() else open_sandbox(sandbox)
        self._skip_run, self._seconds, self._container = skip_run, seconds, ""

    async def reset(self, problem: Problem) -> Sequence[Message]:
        self._task = Path(problem.metadata["task"]).resolve()
        self._workdir, self._files = _environment(self._task, self._skip_run)
        if self._sandbox is None:
            image = await in_thread(_docker, "build", "-q", f"{self._task}/environment")
            self._container = await in_thread(_docker, "run", *CONTAINER.split(), image, "infinity")
        return problem.messages

    async def close(self) -> None:
        if self._container:
            await in_thread(_docker, "rm", "-fv", self._container)

    def bash(self, command: str) -> str:
        """Runs a command in bash and returns what it prints, and its exit code if that is not 0.

        Args:
            command: The command. It begins in the task's folder; files stay, processes do not.
        """
        code, out = self._run(command, self._seconds)
        return out if code == 0 else f"{out}\n(exit code {code})".lstrip("\n")

    async def step(self, text: str) -> Observation:
        observation = await super().step(text)
        if not observation.done:
            return observation
        settings = tomllib.loads((self._task / "task.toml").read_text()).get("verifier", {})
        tests = _packed({PurePosixPath("tests"): self._task / "tests"})
        if self._sandbox is None:  # without the processes that commands have left
            await in_thread(_docker, "restart", "-t0", self._container)
        _, out = await in_thread(self._run, TEST, settings.get("timeout_sec", 600.0), tests)
        try:
            parts = {name: float(value) for name, value in json.loads(out).items()}
            reward = parts.get("reward", fmean(parts.values()))
        except (ValueError, TypeError, AttributeError):
            raise RuntimeError(f"the tests of {self._task.name} leave no reward: {out}") from None
        return replace(observation, reward=reward, parts={**observation.parts, **parts})

    def _run(self, script: str, seconds: float, stdin: str = "") -> tuple[object, str]:
        """Return a script's exit code and output; the files are then as it leaves them."""
        words, most = ["bash", str(seconds), script, self._workdir], int(seconds) + 30
        if self._sandbox is None:
            words = ["exec", "-i", self._container, "bash", "-c", IN_CONTAINER, *words]
            out, _, code = _docker(*words, input=stdin, timeout=most).rpartition("\n")
            return int(code), out.rstrip("\n")
        folders = *FOLDERS, "tests"
        limits = replace(self._sandbox.limits, folders=folders, wall_s=most, cpu_s=most, **SIZES)
        words, files = ["bash", "-c", IN_SANDBOX, *words], {".tandem": self._files}
        result = self._sandbox.run(words, files=files, stdin=stdin, limits=limits)
        if result.exit_code == 3 and not result.stdout:
            raise ToolUnavailable(f"the sandbox has no {self._workdir}: {self._sandbox.state()}")
        if result.exit_code is None:
            return result.stop_reason, ""
        self._files = result.stdout
        return result.exit_code, result.stderr[:65536].rstrip("\n")


def _docker(*words: str, **options: Any) -> str:
    """Return what a command of docker prints. Raises ToolUnavailable."""
    options |= {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run(["docker", *words], **options)
    if done.returncode:
        raise ToolUnavailable(f"docker {words[0]}: {done.stderr[-500:]}")
    return str(done.stdout).rstrip("\n")


@cache
def _has_docker() -> bool:
    return not subprocess.run("docker version", shell=True, capture_output=True).returncode


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
    more: list[Any] = [*place.glob("*compose*"), *folder.glob("steps")]
    more += ["gpus"] * bool(task.get("environment", {}).get("gpus"))
    workdir, files, needs = PurePosixPath("/app"), dict[PurePosixPath, Path](), [*more]
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
    if more or (needs and not _has_docker()):
        what, next = "a task needs a container", "start docker, or set env.options.skip_run"
        raise UserError(what, where=str(folder), found=str(needs[0]), next=next)
    return str(workdir), "" if needs else _packed(files)


def _packed(files: Mapping[PurePosixPath, Path]) -> str:
    """Pack files and folders into a tar without times, as base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, path in files.items():
            tar.add(path, str(name), filter=lambda info: info.replace(mtime=0))
    return base64.b64encode(packed.getvalue()).decode()
