"""The sandboxes: what a program gets, what it does not, and that nothing of it is left.

The hostile programs are in chaos/hostile/escapes.py; those that would get through on a bare machine
are shown to.
"""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.hostile.escapes import ESCAPES
from chaos.hostile.world import World
from tandem.config import schema
from tandem.plugins.graders.sandbox import seccomp
from tandem.plugins.graders.sandbox.fusion import SandboxFusion
from tandem.plugins.graders.sandbox.local import Bubblewrap, Run, Unisolated, supervise
from tandem.plugins.graders.sandbox.protocol import Limits, SandboxFailed, run_python
from tandem.registry import find
from tandem.runtime.errors import UserError
from tests.support.sandbox_fusion import FusionServer
from tests.support.waiting import WAIT_S, eventually, given_time

ROOT = Path(__file__).parents[3]
ROOTS = os.geteuid() == 0
needs_bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="bubblewrap is not installed"
)
# for a program that ends by itself, on the busiest machine
PATIENT = Limits(wall_s=WAIT_S, cpu_s=30)
THROUGH = [
    hostile for hostile in ESCAPES if hostile.open == "any" or (hostile.open == "root" and ROOTS)
]


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


# ---------------------------------------------------------------- the hostile programs


@needs_bubblewrap
@pytest.mark.parametrize("hostile", ESCAPES, ids=lambda hostile: hostile.name)
def test_hostile_program_runs_and_gets_nothing(world, hostile):
    def attack(wall_s):
        return world.attack(
            Bubblewrap(), replace(hostile, limits=replace(hostile.limits, wall_s=wall_s))
        )

    outcomes = given_time(attack, lambda outcome: outcome.ran, hostile.limits.wall_s)
    assert {outcome.escapes for outcome in outcomes} == {()}
    assert outcomes[-1].ran and outcomes[-1].stop_reason in hostile.stops


@pytest.mark.parametrize("hostile", THROUGH, ids=lambda hostile: hostile.name)
def test_hostile_program_without_a_sandbox_gets_it(world, hostile):
    outcome = world.attack(Unisolated(), hostile)
    assert outcome.ran and outcome.escapes


@needs_bubblewrap
def test_fork_bombs_cost_other_runs_nothing(world):
    bomb = next(hostile for hostile in ESCAPES if hostile.name == "fork bomb")
    honest = "import os\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)\nprint('done')"
    with ThreadPoolExecutor(3) as pool:
        bombs = [
            pool.submit(run_python, Bubblewrap(), world.fill(bomb.code), limits=bomb.limits)
            for _ in range(2)
        ]
        runs = [run_python(Bubblewrap(), honest, limits=PATIENT) for _ in range(3)]
        assert [bomb.result().stop_reason for bomb in bombs] == ["timeout", "timeout"]
    assert [run.stdout for run in runs] == ["done\n"] * 3


@pytest.mark.parametrize(
    "kind, processes",
    [
        *(pytest.param("Bubblewrap", n, marks=needs_bubblewrap) for n in (1, 2, 3)),
        ("Unisolated", 1),
    ],
    ids=["at once", "while it starts", "when it runs", "unisolated"],
)
def test_killed_parent_takes_the_sandbox_with_it(world, kind, processes, tmp_path):
    program = ["python", "-c", "import time; time.sleep(3600)", world.token]
    code = (
        "from tandem.plugins.graders.sandbox.local import *; "
        f"{kind}().run({program}, limits=Limits(wall_s=3600.0))"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}  # killed, it cannot remove its folder
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
    deadline = time.monotonic() + WAIT_S
    while len(world.survivors()) <= processes and time.monotonic() < deadline:
        time.sleep(0.001)  # the parent's command line has the token too
    assert parent.poll() is None and time.monotonic() < deadline
    parent.kill()
    parent.wait()
    assert eventually(lambda: not world.survivors())


PLAIN = '''
import os, sys
from tandem.plugins.graders.sandbox.local import Bubblewrap
from tandem.plugins.graders.sandbox.protocol import Limits, run_python
sandbox, patient = Bubblewrap(), Limits(wall_s=120.0)
print(os.getuid(), run_python(sandbox, "print(6 * 7)", limits=patient).stdout.strip())
many = """
import os
n = 0
try:
    while True:
        if os.fork() == 0: os.kill(os.getpid(), 19)
        n += 1
except OSError: print(n)
"""
print(int(run_python(sandbox, many, limits=patient).stdout) < 16)
bomb = "held = []\\nwhile True: held.append(bytearray(2**20))"
print(run_python(sandbox, bomb, limits=Limits(wall_s=120.0, memory_mb=64)).stop_reason)
for code in ("open('/proc/1/mem', 'r+b')", "import os; os.listdir('/root')"):
    print(run_python(sandbox, code, limits=patient).exit_code)
'''


@needs_bubblewrap
def test_orphans_after_a_run_are_not_adopted():
    code = (
        "import subprocess, time; from pathlib import Path\n"
        "from tandem.plugins.graders.sandbox.local import Bubblewrap\n"
        "from tandem.plugins.graders.sandbox.protocol import Limits, run_python\n"
        "run_python(Bubblewrap(), 'print(1)', limits=Limits(wall_s=120.0))\n"
        "for _ in range(5): subprocess.run(['sh', '-c', 'sleep 0.05 &'])\n"
        "time.sleep(0.5); import os\n"
        "print(Path(f'/proc/self/task/{os.getpid()}/children').read_text().split())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


UNDER_INIT = """
import os, sys, time
from tandem.plugins.graders.sandbox.local import Bubblewrap, Limits
sandbox = Bubblewrap()
if sys.argv[1] == "worker" and os.fork():
    os.wait()
else:
    for code in ("pass", "import time; time.sleep(9)"):
        sandbox.run(["python", "main.py"], files={"main.py": code}, limits=Limits(wall_s=0.5))
    time.sleep(0.1)
    stats = [open(f"/proc/{pid}/stat").read() for pid in os.listdir("/proc") if pid.isdigit()]
    print([stat.rpartition(")")[2].split()[0] for stat in stats].count("Z"), flush=True)
"""


@needs_bubblewrap
@pytest.mark.skipif(
    not shutil.which("unshare") or os.geteuid() != 0, reason="makes a pid namespace, as root"
)
@pytest.mark.parametrize("where", ["first", "worker"])
def test_process_1_of_a_container_keeps_no_zombie_of_a_run(where):
    """Python as process 1, as in a container without an init; and a worker beside such a one."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    command += [sys.executable, "-c", UNDER_INIT, where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr) == ("0\n", "")


@needs_bubblewrap
@pytest.mark.skipif(not ROOTS, reason="every other test runs without root already")
def test_sandbox_works_for_an_unprivileged_user():
    python = Bubblewrap().python
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    reachable = subprocess.run(
        [*drop, python, "-c", "import tandem.plugins.graders.sandbox.local"],
        env=env,
        cwd="/",
        capture_output=True,
    )
    if reachable.returncode:
        pytest.skip("this checkout or its Python cannot be read by another user")
    result = subprocess.run(
        [*drop, python, "-c", PLAIN], env=env, cwd="/", capture_output=True, text=True
    )
    assert result.stdout.splitlines() == ["65534 42", "True", "memory", "1", "1"], result.stderr


# ---------------------------------------------------------------- what a program gets


@pytest.fixture(
    params=[pytest.param(Bubblewrap, marks=needs_bubblewrap), Unisolated],
    ids=["bubblewrap", "unisolated"],
)
def sandbox(request):
    return request.param()


def test_program_reads_its_input_and_files(sandbox):
    files = {
        "main.py": "import sub.part, sys\nprint(sub.part.x, input())\nsys.exit('told')",
        "sub/part.py": "x = 'é'",
    }
    result = sandbox.run(["python", "main.py"], files=files, stdin="in\nmore", limits=PATIENT)
    assert (result.stdout, result.stderr) == ("é in\n", "told\n")
    assert (result.exit_code, result.stop_reason) == (1, "exit")
    assert 0 < result.seconds < WAIT_S


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_file_outside_the_working_directory_is_refused(sandbox, name):
    with pytest.raises(ValueError, match="a path inside its working directory"):
        sandbox.run(["true"], files={name: "x"})


@pytest.mark.parametrize(
    "code, reason, exit_code",
    [
        ("import os; os.kill(os.getpid(), 11)", "signal", -11),
        ("while True: print('x' * 1000)", "output", None),
        ("import time; time.sleep(600)", "timeout", None),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "timeout", None),
        ("x = bytearray(10**9)", "memory", 1),
        ("raise SystemExit(7)", "exit", 7),
        ("import os; os.kill(os.getpid(), 24)", "timeout", -signal.SIGXCPU),
    ],
)
def test_result_has_the_stop_reason(sandbox, code, reason, exit_code):
    wall_s = 0.3 if reason == "timeout" and exit_code is None else WAIT_S
    result = run_python(sandbox, code, limits=Limits(wall_s=wall_s, cpu_s=30))
    assert (result.stop_reason, result.exit_code) == (reason, exit_code)


def test_output_is_kept_up_to_the_cap_and_up_to_a_timeout(sandbox):
    flood = run_python(
        sandbox, "while True: print('x' * 999)", limits=replace(PATIENT, output_bytes=5000)
    )
    assert flood.stdout == ("x" * 999 + "\n") * 5
    exact = run_python(sandbox, "print('x' * 4999)", limits=replace(PATIENT, output_bytes=5000))
    assert (len(exact.stdout), exact.stop_reason) == (5000, "exit")
    said = "import time\nprint('said', flush=True)\ntime.sleep(600)"
    results = given_time(
        lambda wall_s: run_python(sandbox, said, limits=Limits(wall_s=wall_s)),
        lambda r: r.stdout,
        0.5,
    )
    assert results[-1].stdout == "said\n"
    assert {result.stop_reason for result in results} == {"timeout"}


def test_two_programs_converse_until_the_first_one_ends(sandbox):
    ask = "import sys\nprint(20, flush=True)\nprint('got', input(), file=sys.stderr)"
    answer = "while True: print(int(input()) * 2 + 2, flush=True)"
    asked, answered = sandbox.converse(
        (["python", "-c", ask], {}), (["python", "-c", answer], {}), limits=PATIENT
    )
    assert (asked.stderr, asked.exit_code, asked.stdout) == ("got 42\n", 0, "")
    assert answered.exit_code is None or "EOFError" in answered.stderr


def test_program_that_dies_before_it_reads_the_gates_answer_is_a_result():
    """The socket is reset then: it has unread bytes."""
    ours, gate = (end.detach() for end in socket.socketpair())
    script = f"echo >&{gate}; sleep 0.3; kill -9 $$"
    process = subprocess.Popen(["bash", "-c", script], pass_fds=[gate], start_new_session=True)
    os.close(gate)
    run = Run(process, PATIENT, gate=ours)
    supervise(run)
    assert run.result().stop_reason == "signal"


def test_interrupted_run_is_killed(sandbox, world):
    def watched():
        stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        return world.survivors() and "supervise" in [frame.f_code.co_name for frame, _ in stack]

    def interrupt():
        eventually(watched)
        signal.raise_signal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(interrupt)
        sandbox.run(
            ["python", "-c", "import time; time.sleep(3600)", world.token],
            limits=Limits(wall_s=600.0),
        )
    assert world.survivors() == []


HOLDING = """
import os, sys, tempfile
from tandem.plugins.graders.sandbox import local as s
from tandem.plugins.graders.sandbox.protocol import run_python
def held(): return sorted(os.listdir("/proc/self/fd")), os.listdir(tempfile.gettempdir())
sandbox = getattr(s, sys.argv[1])()
run_python(sandbox, "pass")
before = held()
run_python(sandbox, "pass")
run_python(sandbox, "import time; time.sleep(600)", limits=s.Limits(wall_s=0.3))
sandbox.converse((["true"], {}), (["true"], {}))
assert held() == before, (before, held())
"""


def test_no_descriptor_or_folder_is_left_behind(sandbox, tmp_path):
    """In a process of its own, where no thread of another test opens or closes anything
    meanwhile."""
    command = [sys.executable, "-c", HOLDING, type(sandbox).__name__]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- choosing one


def opened(config):
    return find("sandboxes", config.kind, key="sandbox")(config)


@needs_bubblewrap
def test_working_bubblewrap_is_chosen_despite_the_switch():
    assert isinstance(opened(schema.Sandbox()), Bubblewrap)
    assert isinstance(opened(schema.Sandbox(run_untrusted_code_without_isolation=True)), Bubblewrap)
    assert opened(schema.Sandbox()).state().startswith("bubblewrap ")
    assert "works" in opened(schema.Sandbox()).state()


def test_code_without_a_sandbox_needs_the_dangerous_switch(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError) as caught:
        opened(schema.Sandbox())
    assert "apt-get install bubblewrap" in caught.value.next
    assert "sandbox.run_untrusted_code_without_isolation" in caught.value.next
    assert caught.value.found.startswith("no bwrap")
    switched = schema.Sandbox(run_untrusted_code_without_isolation=True)
    assert isinstance(opened(switched), Unisolated)
    assert opened(switched).state().startswith("NOT ISOLATED")


@needs_bubblewrap
@pytest.mark.parametrize("bwrap", ["false", "/nowhere/bwrap"])
def test_failing_bubblewrap_is_not_the_programs_failure(bwrap):
    with pytest.raises(SandboxFailed, match="before the program began"):
        run_python(Bubblewrap(bwrap), "print(1)")


# ---------------------------------------------------------------- SandboxFusion


def test_remote_request_has_sandbox_fusions_fields():
    with FusionServer() as server:
        result = SandboxFusion(server.url + "/").run(
            ["python", "main.py"],
            files={"main.py": "import part; print(part.x, input())", "part.py": "x = 1"},
            stdin="in",
            limits=PATIENT,
        )
        assert (result.stdout, result.exit_code, result.stop_reason) == ("1 in\n", 0, "exit")
        (request,) = server.requests
        assert (request["language"], request["stdin"]) == ("python", "in")
        assert request["files"] == {"part.py": "eCA9IDE="} and request["run_timeout"] == WAIT_S
        assert request["code"] == "import part; print(part.x, input())"


@pytest.mark.parametrize(
    "code, reason, exit_code",
    [
        ("import time; time.sleep(600)", "timeout", None),
        ("print('x' * 10**6)", "output", None),
        ("raise SystemExit(7)", "exit", 7),
        ("raise MemoryError", "memory", 1),
        ("import os; os.kill(os.getpid(), 9)", "signal", -9),
    ],
)
def test_remote_result_has_the_stop_reason(code, reason, exit_code):
    with FusionServer() as server:
        result = run_python(
            SandboxFusion(server.url),
            code,
            limits=Limits(wall_s=0.5 if reason == "timeout" else WAIT_S),
        )
    assert (result.stop_reason, result.exit_code) == (reason, exit_code)


@pytest.mark.parametrize(
    "answer", [{"status": "SandboxError", "message": "no room", "run_result": None}, ["x"], "text"]
)
def test_failing_server_is_not_the_programs_failure(answer):
    with FusionServer(answer) as server:
        with pytest.raises(SandboxFailed, match=r"did not run the program|no JSON object"):
            run_python(SandboxFusion(server.url), "print(1)")
        assert opened(schema.Sandbox(url=server.url)).state().startswith("fails")
    with pytest.raises(SandboxFailed, match="no answer"):
        run_python(SandboxFusion(server.url), "print(1)")


# ---------------------------------------------------------------- the filter of system calls


def verdict(program, arch, number, argument=0, flags=0):
    """Decide as the kernel would: classic BPF over struct seccomp_data."""
    data = struct.pack("=iIQ6Q", number, arch, 0, argument, 0, 0, flags, 0, 0)
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = held = 0
    while True:
        code, yes, no, k = instructions[at]
        at += 1
        match code:
            case 0x20:
                (held,) = struct.unpack_from("=I", data, k)
            case 0x15:
                at += yes if held == k else no
            case 0x35:
                at += yes if held >= k else no
            case 0x54:
                held &= k
            case 0x06:
                return k


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_refuses_what_it_lists_and_nothing_else(machine):
    column, arch = seccomp.ARCHITECTURES[machine]
    program = seccomp.seccomp_filter(machine)
    listed = {numbers[column] for numbers in seccomp.REFUSED.values()}
    refused = {number for number in range(600) if verdict(program, arch, number) != seccomp.ALLOW}
    # family 0 is none of those allowed
    assert refused == (listed - {None}) | {seccomp.SOCKET[column]}
    families = {
        family
        for family in range(64)
        if verdict(program, arch, seccomp.SOCKET[column], family) == seccomp.ALLOW
    }
    assert families == {1}  # AF_UNIX
    private, shared, validated, of_a_file = 0x22, 0x21, 0x23, 0x01
    mapped = [
        verdict(program, arch, seccomp.MMAP[column], flags=flags) == seccomp.ALLOW
        for flags in (private, of_a_file, shared, validated)
    ]
    assert mapped == [True, True, False, False]
    assert verdict(program, arch ^ 1, 0) == seccomp.KILL
    assert verdict(program, arch, 0x40000001) == seccomp.ERRNO | 38
