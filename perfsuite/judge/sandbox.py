"""Confine this process before it runs untrusted code: restrict files, network, signals and other processes.

This works on Linux only, and needs no privileges. Landlock restricts files, sockets and signals, a seccomp filter
restricts system calls, and resource limits are set. A process gets this file as source text, so it imports nothing from
perfsuite.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence

READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys")
"""Folders that Python and compilers read, in addition to those of Python's packages."""
OPTIONAL = ("/opt",)
"""Folders of READ_ONLY that are left out if they contain the reference."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia*", "/dev/dxg")
OWN = "/proc/self"
"""Folder in which CUDA names its threads. CUDA does not start if it may not write there."""
MEMORY_SHARE = 0.8
"""Share of the machine's memory that the process may allocate."""
FILE_BYTES = 8 << 30

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 15
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock → number of file access rights that it has."""
_NET_BOTH, _SCOPE_BOTH = 0b11, 0b11
"""TCP bind and connect; abstract sockets and signals."""
_WITHOUT_LANDLOCK = ("files", "network", "signals to other processes")
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPABILITIES = 0x20080522
_NO_NEW_PRIVILEGES, _DIE_WITH_PARENT, _SECCOMP = 38, 1, 22

_CALLS = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
        "perf_event_open": 298, "bpf": 321, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308,
        "clock_settime": 227, "settimeofday": 164, "adjtimex": 159, "clock_adjtime": 305, "kexec_load": 246,
        "init_module": 175, "finit_module": 313, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "reboot": 169,
        "swapon": 167, "io_uring_setup": 425, "chroot": 161, "pivot_root": 155, "kcmp": 312,
        "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
        "prlimit64": 302, "setpriority": 141, "setsid": 112, "setpgid": 109, "connect": 42, "timer_create": 222,
        "ioprio_set": 251, "fcntl": 72, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94,
        "utime": 132, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "utimensat": 280,
        "fchmodat2": 452, "socketpair": 53, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65,
        "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
        "mq_unlink": 241,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438,
        "perf_event_open": 241, "bpf": 280, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268,
        "clock_settime": 112, "settimeofday": 170, "adjtimex": 171, "clock_adjtime": 266, "kexec_load": 104,
        "init_module": 105, "finit_module": 273, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "reboot": 142,
        "swapon": 224, "io_uring_setup": 425, "chroot": 51, "pivot_root": 41, "kcmp": 272,
        "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118, "sched_setattr": 274,
        "prlimit64": 261, "setpriority": 140, "setsid": 157, "setpgid": 154, "connect": 203, "timer_create": 107,
        "ioprio_set": 30, "fcntl": 25, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14,
        "lremovexattr": 15, "fremovexattr": 16, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
        "utimensat": 88, "fchmodat2": 452, "socketpair": 199, "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190,
        "semop": 193, "semctl": 191, "semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187,
        "mq_open": 180, "mq_unlink": 181,
    },
}  # fmt: skip
_SOCKETS = ("socket", "socketpair")
_OF_PROCESS = {
    "sched_setaffinity": 0, "sched_setscheduler": 0, "sched_setparam": 0, "sched_setattr": 0, "prlimit64": 0,
    "setpriority": 1,
}  # fmt: skip
"""System call that a process may apply to itself → index of the argument that names the process, which must be 0."""
_WITHOUT_EFFECT = frozenset({
    "setpgid", "chmod", "fchmod", "chown", "fchown", "lchown", "utime", "setxattr", "lsetxattr", "fsetxattr",
    "removexattr", "lremovexattr", "fremovexattr", "utimes", "fchownat", "futimesat", "fchmodat", "utimensat",
    "fchmodat2",
})  # fmt: skip
"""System calls that have no effect and return no error: compilers make process groups, and copying a file sets its
mode. Landlock does not prevent a process from changing the mode or the owner of any of the user's files."""
_REFUSED_VALUES = {"fcntl": (1, 10)}
"""System call → (index of an argument, the value that is refused). F_SETSIG chooses a signal, such as SIGCONT."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _PRETEND = 0x7FFF0000, 0x00050000 | 1, 0x00050000  # EPERM; no error, and nothing done
_ABSENT = 0x00050000 | 2
"""ENOENT: to CUDA it looks as if none of its services runs."""
_OTHER_NUMBERS = 0x40000000
"""Lowest number of the x32 system calls, with which a filter could be bypassed."""


def confine(scratch: str, *, hidden: Sequence[str] = (), shown: Sequence[str] = (), cpu_s: int = 0) -> list[str]:
    """Restrict this process to reading what Python needs and writing to `scratch`. Return the restrictions that could
    not be enforced.

    A folder that contains a path of `hidden` cannot be read, even if Python would import from it. A folder of READ_ONLY
    stays readable nevertheless, unless it is in OPTIONAL; reading the path is then one of the restrictions that are
    returned, and so is reading a path of `shown` in any folder that stays readable. The restrictions cannot be undone,
    and also hold for the processes that this one starts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    lacking = _limit(cpu_s)
    libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)
    if libc.capset(struct.pack("<Ii", _CAPABILITIES, 0), bytes(24)):
        lacking.append("the capabilities of its user")
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return [*lacking, "privileges of programs that it starts"]
    system = [p for p in READ_ONLY if p not in OPTIONAL or not _holds(p, hidden)]
    readable = [*system, *_packages(hidden)]
    lacking += _landlock(libc, [scratch], readable)
    lacking += [f"reading {h}" for h in (*hidden, *shown) if any(_holds(p, [h]) for p in readable)]
    lacking += _filter_calls(libc)
    return lacking


def _packages(hidden: Sequence[str]) -> list[str]:
    """Return the folders that Python imports from, except those that contain a hidden path."""
    every = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, *sys.path) if p and os.path.isdir(p)}
    return [p for p in every if not _holds(p, hidden)]


def _holds(folder: str, paths: Sequence[str]) -> bool:
    """Return whether one of the paths is inside the folder."""
    return any(os.path.realpath(p).startswith(os.path.join(os.path.realpath(folder), "")) for p in paths)


def _limit(cpu_s: int) -> list[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_DATA": int(MEMORY_SHARE * memory)}
    if cpu_s:
        limits["RLIMIT_CPU"] = cpu_s
    lacking = []
    for name, most in limits.items():
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (least, least))
        except (OSError, ValueError, AttributeError):
            lacking.append(f"the limit {name}")
    return lacking


def _landlock(libc: ctypes.CDLL, writable: Sequence[str], readable: Sequence[str]) -> list[str]:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return [*_WITHOUT_LANDLOCK]
    every = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    parts = [every, *([_NET_BOTH] if version >= 4 else []), *([_SCOPE_BOTH] if version >= 6 else [])]
    rules = struct.pack(f"<{len(parts)}Q", *parts)
    ruleset = libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        return [*_WITHOUT_LANDLOCK]
    only_files = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | _IOCTL_DEV
    granted = [(p, every) for p in (*writable, OWN)]
    granted += [(p, _EXECUTE | _READ_FILE | _READ_DIR) for p in readable]
    granted += [(p, _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEV) for d in DEVICES for p in glob.glob(d)]
    try:
        for path, rights in granted:
            try:
                at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            if not os.path.isdir(path):
                rights &= only_files
            libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("<Qi", rights & every, at), 0)
            if path != OWN:  # an inode of /proc, for which the rule holds, lives only while it is open
                os.close(at)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0):
            return [*_WITHOUT_LANDLOCK]
    finally:
        os.close(ruleset)
    return [
        *(["connections over TCP"] if version < 4 else []),
        *(["signals to other processes"] if version < 6 else []),
    ]


def _filter_calls(libc: ctypes.CDLL) -> list[str]:
    machine = platform.machine()
    if machine not in _CALLS:
        return ["system calls"]
    calls = _CALLS[machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _OTHER_NUMBERS), (_RETURN, 0, 0, _REFUSE)]
    for name in _SOCKETS:
        # The arguments are the domain and the type. AF_UNIX (1) is allowed: such a socket does not leave this machine,
        # and SOCK_STREAM (1) and SOCK_SEQPACKET (5) need `connect`. Others send messages to any address without it.
        program += [(_EQUAL, 0, 8, calls[name]), (_LOAD, 0, 0, 16), (_EQUAL, 0, 4, 1)]
        program += [(_LOAD, 0, 0, 24), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, 1), (_EQUAL, 1, 0, 5)]
        program += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    for name, number in calls.items():
        if name in _OF_PROCESS:
            program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * _OF_PROCESS[name]), (_EQUAL, 1, 0, 0)]
            program += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
        elif name in _REFUSED_VALUES:
            argument, value = _REFUSED_VALUES[name]
            program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * argument), (_EQUAL, 0, 1, value)]
            program += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
        elif name not in _SOCKETS:
            answer = _PRETEND if name in _WITHOUT_EFFECT else _ABSENT if name == "connect" else _REFUSE
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(held)))
    return ["system calls"] if libc.prctl(_SECCOMP, 2, filter_, 0, 0) else []
