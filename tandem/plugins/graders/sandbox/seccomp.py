"""The filter of system calls for sandboxed programs, which Linux runs at every call.

Most of the refused calls have served elsewhere as a way out of a container, or into the kernel:
tracing, mounts, namespaces, keyrings, io_uring, bpf. The rest is memory outside every limit of a
process: System V segments, message queues and memfds outlive the process's use of them, and the
pages of anonymous shared mappings stay when they are unmapped. Of sockets only those between
processes (AF_UNIX) are left: AF_VSOCK talks to the hypervisor from any namespace, and the buffers
of TCP connections, which would lead nowhere, held gigabytes of the kernel's memory.

A refused call returns EPERM (a socket of another family EAFNOSUPPORT), so a program sees an
exception. Does not load the filter, and has tables for x86-64 and AArch64 only: elsewhere there is
no filter.

    python -c "from tandem.plugins.graders.sandbox.seccomp import *; print(len(seccomp_filter()))"
"""

import errno
import platform
import struct

# name, its number on x86-64 and on AArch64; -: the machine has no such call
_TABLE = (
    # into another process, or back into oneself by a way that is not watched
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, "
    "pidfd_getfd 438 438, process_madvise 440 440, personality 135 92, "
    # another view of the system
    "mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, "
    "setns 308 268, open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, "
    "fsmount 432 432, fspick 433 433, mount_setattr 442 442, name_to_handle_at 303 264, "
    "open_by_handle_at 304 265, "
    # memory that no limit counts
    "shmget 29 194, shmat 30 196, semget 64 190, msgget 68 186, mq_open 240 180, "
    "memfd_create 319 279, memfd_secret 447 447, "
    # a wide door into the kernel that no solution of a task needs
    "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, "
    "io_uring_enter 426 426, io_uring_register 427 427, add_key 248 217, request_key 249 218, "
    "keyctl 250 219, vmsplice 278 75, modify_ldt 154 -, iopl 172 -, ioperm 173 -, "
    "fanotify_init 300 262, quotactl 179 60, syslog 103 116, kexec_load 246 104, "
    "init_module 175 105, finit_module 313 273, delete_module 176 106, swapon 167 224, "
    "reboot 169 142, acct 163 89"
)
REFUSED = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in map(str.split, _TABLE.split(","))
}
SOCKET, MMAP = (41, 198), (9, 222)
FAMILIES = (1,)  # AF_UNIX
SHARED = 0x21  # MAP_SHARED and MAP_ANONYMOUS

# column of the tables, AUDIT_ARCH_*
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32 = 0x40000000  # numbers from here are x86-64's other table, which the list above does not name

# classic BPF: ld abs, jeq k, jge k, ret k, and k
LOAD, EQUAL, AT_LEAST, RETURN, AND = 0x20, 0x15, 0x35, 0x06, 0x54
# offsets in struct seccomp_data; the low words of the first and the fourth argument
NUMBER, ARCH, ARGUMENT, FLAGS = 0, 4, 16, 40
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(machine: str = platform.machine()) -> bytes:
    """Assemble the filter for the kernel, 8 bytes an instruction; b"" for an unknown machine."""
    if machine not in ARCHITECTURES:
        return b""
    column, arch = ARCHITECTURES[machine]
    program = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    program += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    program += [(EQUAL, 0, 5, MMAP[column]), (LOAD, 0, 0, FLAGS), (AND, 0, 0, SHARED)]
    program += [(EQUAL, 0, 1, SHARED), (RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    program += [(EQUAL, 1, 0, SOCKET[column]), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, ARGUMENT)]
    for family in FAMILIES:
        program += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program.append((RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
