"""Programs that try to get out of a sandbox, or to take more of the machine than their share."""

import platform

from chaos.hostile.world import Hostile
from tandem.plugins.graders.sandbox.protocol import Limits

QUICK = Limits(wall_s=0.3, cpu_s=2)
SMALL = Limits(wall_s=60.0, cpu_s=30, memory_mb=128)
X86 = platform.machine() == "x86_64"


def reads(name, path, open="any"):
    return Hostile(name=name, code=f"escaped(open({path!r}, 'rb').read(20))", open=open)


def refused(name, numbers, arguments="", open=""):
    """A system call that must not work: a result of 0 or more is an escape. numbers: on x86-64 and
    AArch64."""
    call = (
        f"libc.syscall({numbers[0] if X86 else numbers[1]}{', ' + arguments if arguments else ''})"
    )
    return Hostile(name=name, code=f"result = {call}\nif result >= 0: escaped('{name}')", open=open)


def opens(name, path, flags="os.O_WRONLY", open=""):
    return Hostile(name=name, code=f"os.open({path!r}, {flags}); escaped({path!r})", open=open)


READING = [
    reads("read a secret file", "$SECRET"),
    reads("read the repository", "$REPOSITORY/tandem/plugins/graders/sandbox/__init__.py"),
    reads("read the repository's git", "$REPOSITORY/.git/HEAD", open=""),
    reads("read the shadow file", "/etc/shadow", open="root"),
    reads("read the users", "/etc/passwd"),
    reads("read by dots", "../../../../../../../../../../$SECRET"),
    reads("read by the root of pid 1", "/proc/1/root/$SECRET", open=""),
    reads("read by our own root", "/proc/self/root/$SECRET"),
    reads("read the kernel's memory", "/proc/kcore", open=""),
    Hostile(name="list the home", code="os.listdir('$HOME'); escaped('home')", open="any"),
    Hostile(
        name="read by a symlink",
        code="os.symlink('$SECRET', 'link'); escaped(open('link').read())",
        open="any",
    ),
    Hostile(
        name="read the parent's environment",
        code="if b'$TOKEN' in open('/proc/$VICTIM/environ', 'rb').read(): escaped('environment')",
        open="any",
    ),
    Hostile(
        name="read the environment of all processes",
        code="""
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: text = open(f'/proc/{pid}/environ', 'rb').read()
    except OSError: continue
    if b'$TOKEN' in text: escaped(pid)
""",
        open="any",
    ),
    Hostile(
        name="see the host's processes",
        code="""
pids = list(filter(str.isdigit, os.listdir('/proc')))
if any(b'victim' in open(f'/proc/{pid}/cmdline', 'rb').read() for pid in pids): escaped('host pids')
""",
        open="any",
    ),
    Hostile(
        name="inherited descriptors",
        code="""
for fd in range(3, 256):
    try: escaped((fd, os.readlink(f'/proc/self/fd/{fd}')))
    except OSError: pass
""",
    ),
    Hostile(
        name="descriptors of other processes",
        code="""
for pid in filter(str.isdigit, os.listdir('/proc')):
    if int(pid) == os.getpid(): continue
    try: fds = os.listdir(f'/proc/{pid}/fd')
    except OSError: continue
    for fd in fds:
        try: target = os.readlink(f'/proc/{pid}/fd/{fd}')
        except OSError: continue
        if target.startswith('/') and not target.startswith(('/dev/null', '/memfd:')):
            escaped((pid, fd, target))
""",
    ),
    Hostile(
        name="read a block device",
        code="""
import stat
for name in os.listdir('/dev'):
    if stat.S_ISBLK(os.stat('/dev/' + name).st_mode):
        open('/dev/' + name, 'rb').read(512); escaped(name)
""",
    ),
    Hostile(
        name="make a block device",
        code="""
import stat
for major in (8, 254, 259):
    os.mknod(f'disk{major}', 0o600 | stat.S_IFBLK, os.makedev(major, 0)); escaped(major)
""",
        open="perhaps",
    ),
    reads("read the kernel's log", "/dev/kmsg", open=""),
]

WRITING = [
    Hostile(
        name="write to the host",
        code="os.makedirs('$WORLD', exist_ok=True); open('$WORLD/mark', 'w').write('x')",
        open="any",
    ),
    Hostile(
        name="write to the system",
        code="""
for folder in ('/', '/usr', '/usr/bin', '/usr/lib', '/etc', '/bin', '/dev', '/proc', '/var',
               '/lib'):
    try: open(folder + '/tandem-mark', 'w').close(); escaped(folder)
    except OSError: pass
""",
    ),
    Hostile(
        name="write through the symlink of a mount",
        code="os.symlink('/usr/bin', 'bin'); open('bin/tandem-mark', 'w').close(); escaped('usr')",
    ),
    Hostile(
        name="overwrite the interpreter",
        code="""
for path in ('/proc/self/exe', sys.executable, os.path.realpath(sys.executable)):
    try: os.open(path, os.O_WRONLY); escaped(path)
    except OSError: pass
os.replace('main.py', sys.executable); escaped('replaced')
""",
    ),
    opens("set the core pattern", "/proc/sys/kernel/core_pattern", open="perhaps"),
    opens("set the module loader", "/proc/sys/kernel/modprobe"),
    opens("press the system's keys", "/proc/sysrq-trigger", open=""),
    opens("use the system's cgroups", "/sys/fs/cgroup", "os.O_RDONLY", open="perhaps"),
    opens("open the terminal", "/dev/tty", "os.O_RDWR"),
    Hostile(name="write to its own input", code="os.write(0, b'x'); escaped('stdin')"),
    Hostile(
        name="make its own input grow",
        code="os.ftruncate(os.open('/proc/self/fd/0', os.O_RDWR), 2**30); escaped('stdin')",
    ),
]

NETWORK = [
    Hostile(
        name="tcp to the host",
        code="socket.create_connection(('127.0.0.1', $TCP), 1); escaped('tcp')",
        open="any",
    ),
    Hostile(
        name="udp to the host",
        code="socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', $UDP))",
        open="any",
    ),
    Hostile(
        name="an abstract socket of the host",
        code="socket.socket(socket.AF_UNIX).connect('\\0$TOKEN'); escaped('abstract')",
        open="any",
    ),
    Hostile(
        name="a socket in the host's files",
        code="socket.socket(socket.AF_UNIX).connect('$WORLD/socket'); escaped('socket')",
        open="any",
    ),
    Hostile(
        name="tcp to the internet",
        code="socket.create_connection(('1.1.1.1', 53), 1); escaped('internet')",
    ),
    Hostile(name="look a name up", code="socket.getaddrinfo('example.com', 80); escaped('dns')"),
    Hostile(
        name="ask a name server",
        code="""
out = socket.socket(type=socket.SOCK_DGRAM); out.settimeout(0.5)
out.sendto(b'\\0' * 12, ('8.8.8.8', 53)); escaped('sent')
""",
    ),
    Hostile(
        name="any interface but the loop",
        code="if [n for _, n in socket.if_nameindex() if n != 'lo']: escaped('interfaces')",
    ),
    Hostile(
        name="the hypervisor's socket",
        code="socket.socket(40, socket.SOCK_STREAM); escaped('vsock')",
    ),
    Hostile(
        name="a netlink socket",
        code="socket.socket(16, socket.SOCK_RAW); escaped('netlink')",
        open="perhaps",
    ),
    Hostile(
        name="a raw packet socket",
        code="socket.socket(17, socket.SOCK_RAW); escaped('raw')",
        open="perhaps",
    ),
    Hostile(
        name="a crypto socket", code="socket.socket(38, socket.SOCK_SEQPACKET); escaped('alg')"
    ),
]

KERNEL = [
    Hostile(
        name="a user namespace",
        code="if libc.unshare(0x10000000) == 0: escaped('user namespace')",
        open="perhaps",
    ),
    Hostile(
        name="a user namespace by clone",
        code="""
number, flags = (56, 0x10000000 | 17) if os.uname().machine == 'x86_64' else (220, 0x10000000 | 17)
pid = libc.syscall(number, flags, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: escaped('clone')
""",
        open="perhaps",
    ),
    Hostile(
        name="a user namespace by unshare(1)",
        code="if subprocess.run(['unshare', '--user', 'true']).returncode == 0: escaped('unshare')",
        open="perhaps",
    ),
    Hostile(
        name="a mount namespace",
        code="if libc.unshare(0x00020000) == 0: escaped('mount namespace')",
        open="perhaps",
    ),
    Hostile(
        name="another bubblewrap inside",
        code="""
args = ['bwrap', '--unshare-user', '--ro-bind', '/', '/', 'true']
if subprocess.run(args).returncode == 0: escaped('bwrap')
""",
    ),
    Hostile(
        name="mount a tmpfs",
        code="if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: escaped('mount')",
    ),
    Hostile(
        name="remount the system writable",
        code="if libc.mount(b'none', b'/usr', None, 0x20 | 0x1000, None) == 0: escaped('remount')",
    ),
    Hostile(name="unmount what covers", code="if libc.umount2(b'/tmp', 2) == 0: escaped('umount')"),
    Hostile(
        name="out of a chroot",
        code="""
os.mkdir('cell'); os.chroot('cell')
for _ in range(50): os.chdir('..')
os.chroot('.'); escaped(os.listdir('/'))
""",
        open="perhaps",
    ),
    refused("pivot_root", (155, 41), "b'.', b'.'"),
    Hostile(
        name="enter the namespaces of pid 1",
        code="""
for kind in ('mnt', 'net', 'user', 'pid'):
    if libc.setns(os.open(f'/proc/1/ns/{kind}', os.O_RDONLY), 0) == 0: escaped(kind)
""",
    ),
    Hostile(name="trace pid 1", code="if libc.ptrace(16, 1, 0, 0) == 0: escaped('ptrace')"),
    Hostile(
        name="trace a process of the host",
        code="""
if libc.ptrace(16, $VICTIM, 0, 0) == 0:
    os.waitpid($VICTIM, 0); libc.ptrace(17, $VICTIM, 0, 0); escaped('ptrace')
""",
        open="perhaps",
    ),
    Hostile(name="read the memory of pid 1", code="open('/proc/1/mem', 'r+b'); escaped('memory')"),
    Hostile(name="become root", code="os.setresuid(0, 0, 0); escaped('uid 0')", open="root"),
    Hostile(name="change the group", code="os.setgroups([0]); escaped('groups')", open="root"),
    Hostile(
        name="a program that is root's",
        code="""
import stat
for name in os.listdir('/usr/bin'):
    if os.stat('/usr/bin/' + name).st_mode & stat.S_ISUID and 'mount' in name:
        if subprocess.run([name, '-t', 'tmpfs', 'none', '/tmp']).returncode == 0: escaped(name)
""",
    ),
    Hostile(
        name="hold a capability",
        code="""
lines = dict(line.split(':', 1) for line in open('/proc/self/status'))
if any(int(lines[name], 16) for name in ('CapEff', 'CapPrm', 'CapBnd', 'CapAmb')):
    escaped('capabilities')
if lines['NoNewPrivs'].strip() != '1' or lines['Seccomp'].strip() == '0': escaped('privileges')
""",
        open="root",
    ),
    refused("bpf", (321, 280), "0, 0, 0"),
    refused(
        "perf_event_open",
        (298, 241),
        "ctypes.create_string_buffer(b'\\1\\0\\0\\0\\160', 112), 0, -1, -1, 0",
    ),
    refused("io_uring_setup", (425, 425), "4, ctypes.create_string_buffer(120)", open="perhaps"),
    refused("userfaultfd", (323, 282), "1", open="perhaps"),
    refused("add_key", (248, 217), "b'user', b'x', b'y', 1, -2"),
    refused("memfd_create", (319, 279), "b'x', 0", open="perhaps"),
    refused("shmget", (29, 194), "0, 4096, 0o1600", open=""),
    refused("personality", (135, 92), "0x0040000", open="perhaps"),
    refused("reboot", (169, 142), "0, 0, 0, 0"),
]

SIGNALS = [
    Hostile(
        name="kill a process of the host",
        code="""
os.kill($VICTIM, 9); escaped('kill')
while ') Z' not in open('/proc/$VICTIM/stat').read(): time.sleep(0.01)
""",
        open="any",
    ),
    Hostile(name="signal the parent", code="os.kill($PARENT, 0); escaped('parent')", open="any"),
    Hostile(name="signal everyone", code="os.kill(-1, 9)", stops=("exit", "signal")),
    Hostile(name="signal its group", code="os.killpg(0, 9)", stops=("signal",)),
    Hostile(
        name="kill pid 1", code="os.kill(1, 9); os.kill(1, 19); time.sleep(0.05); os.kill(1, 15)"
    ),
    Hostile(
        name="stop itself",
        code="os.kill(os.getpid(), signal.SIGSTOP)",
        stops=("timeout",),
        limits=QUICK,
    ),
    Hostile(
        name="ignore every signal",
        code="""
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
        stops=("timeout",),
        limits=QUICK,
    ),
]

SPAWN = (
    "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(30)', '$TOKEN'], {how})"
)
RESOURCES = [
    Hostile(
        name="fork bomb",
        code="""
while True:
    try: os.fork()
    except OSError: pass
""",
        stops=("timeout",),
        limits=Limits(wall_s=0.6, cpu_s=2),
    ),
    Hostile(
        name="more processes than allowed",
        code="""
children = []
try:
    for _ in range(40):
        pid = os.fork()
        if pid == 0: time.sleep(600); os._exit(0)
        children.append(pid)
finally:
    for pid in children: os.kill(pid, 9)
    if len(children) > 16: escaped(len(children))
""",
        open="any",
    ),
    Hostile(
        name="thread bomb",
        code="""
threads = threading.stack_size(65536)
try:
    while threads < 40:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); threads += 1
finally:
    if threads > 16: escaped(threads)
""",
        open="any",
    ),
    Hostile(
        name="an orphan",
        code=SPAWN.format(how="start_new_session=True, stdin=-3, stdout=-3, stderr=-3"),
        open="any",
    ),
    Hostile(
        name="a daemon that holds our pipes",
        code=SPAWN.format(how="start_new_session=True"),
        limits=Limits(wall_s=60.0),
        open="any",
    ),
    Hostile(
        name="a daemon after os._exit",
        code=f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SPAWN.format(how="start_new_session=True, stdout=-3, stderr=-3")}
        time.sleep(30)
time.sleep(0.5)  # until it is a daemon
os._exit(0)
""",
        limits=Limits(wall_s=60.0),
        open="any",
    ),
    Hostile(name="sleep for ever", code="time.sleep(10**6)", stops=("timeout",), limits=QUICK),
    Hostile(name="spin", code="while True: pass", stops=("timeout",), limits=QUICK),
    Hostile(
        name="spin past the CPU limit",
        code="""
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
        stops=("signal",),
        limits=Limits(wall_s=60.0, cpu_s=1),
    ),
    Hostile(
        name="close everything and wait",
        code="os.closerange(0, 64); time.sleep(10**6)",
        stops=("timeout",),
        limits=QUICK,
    ),
    Hostile(
        name="memory bomb",
        code="held = [bytearray(2**24) for _ in range(10**6)]",
        stops=("memory",),
        limits=SMALL,
    ),
    Hostile(
        name="memory bomb in many processes",
        code="""
try:
    for _ in range(6): os.fork()
except OSError: pass
held = []
while True:
    held.append(bytearray(os.urandom(1) * 2**20)); time.sleep(0.001)
""",
        stops=("memory",),
        limits=SMALL,
    ),
    Hostile(
        name="shared memory that no process holds",
        code="""
import mmap
held = mmap.mmap(-1, 64 * 2**20)
escaped('shared')
""",
        open="any",
        limits=SMALL,
    ),
    Hostile(
        name="shared memory of a device",
        code="""
import mmap
with open('/dev/zero', 'r+b') as zero: held = mmap.mmap(zero.fileno(), 2**20)
escaped('shared')
""",
        open="any",
    ),
    Hostile(
        name="the buffers of tcp connections",
        code="""
server = socket.create_server(('127.0.0.1', 0))
escaped('tcp')
""",
    ),
    Hostile(
        name="memory that is shared",
        code="""
import mmap
held = mmap.mmap(-1, 2**40)
""",
        limits=SMALL,
    ),
    Hostile(
        name="fill the disk",
        code="""
total = 0
try:
    for number in range(40):
        with open(str(number), 'wb', 0) as file: total += file.write(b'x' * 2**20)
finally:
    if total > 17 * 2**20: escaped(total)
""",
        open="any",
    ),
    Hostile(
        name="fill the shared memory",
        code="""
total = 0
try:
    for number in range(64):
        with open(f'/dev/shm/tandem$TOKEN', 'ab', 0) as file: total += file.write(b'x' * 2**20)
finally:
    os.unlink('/dev/shm/tandem$TOKEN')
    if total > 17 * 2**20: escaped(total)
""",
    ),
    Hostile(
        name="one file of a terabyte",
        code="open('big', 'wb').truncate(2**40); escaped('sparse')",
        stops=("exit", "signal"),
    ),
    Hostile(
        name="a million files",
        code="""
for number in range(10**6): open(f'/tmp/{number}', 'x').close()
escaped('files')
""",
        stops=("memory",),
        limits=Limits(wall_s=60.0, cpu_s=60),
    ),
    Hostile(name="flood stdout", code="while True: print('x' * 10**5)", stops=("output",)),
    Hostile(name="flood stderr", code="while True: os.write(2, b'x' * 10**5)", stops=("output",)),
    Hostile(
        name="flood from a child",
        code="""
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b'x' * 10**5)
time.sleep(10**6)
""",
        stops=("output",),
    ),
    Hostile(
        name="raise its limits",
        code="""
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try: resource.setrlimit(kind, (-1, -1)); escaped(kind)
    except (OSError, ValueError): pass
""",
        open="",
    ),
    Hostile(name="raise its priority", code="os.nice(-5); escaped('nice')", open="perhaps"),
    Hostile(
        name="a huge number",
        code="sys.set_int_max_str_digits(0); print(9**9**9)",
        stops=("timeout",),
        limits=QUICK,
    ),
    Hostile(
        name="recurse without end",
        code="sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        stops=("signal", "memory", "timeout"),
        limits=QUICK,
    ),
    Hostile(name="crash", code="ctypes.string_at(0)", stops=("signal",)),
    Hostile(name="pretend to be killed", code="os._exit(137)", stops=("signal",)),
    Hostile(
        name="write what is not text", code="os.write(1, bytes(range(256)) * 10)", stops=("exit",)
    ),
    Hostile(
        name="delete the program",
        code="""
for name in os.listdir('/tmp'): os.unlink(name)
os.symlink('/proc/self/exe', 'main.py')
""",
    ),
    Hostile(
        name="fill pipes",
        code="""
import fcntl
held = []
while True:
    held.append(os.pipe())
    fcntl.fcntl(held[-1][1], 1031, 2**20); os.write(held[-1][1], b'x' * 2**20)
""",
        stops=("exit", "timeout"),
        limits=QUICK,
    ),
]

ESCAPES = [*READING, *WRITING, *NETWORK, *KERNEL, *SIGNALS, *RESOURCES]
