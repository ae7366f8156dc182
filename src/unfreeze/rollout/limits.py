"""Limits of a grader's process, and what confines it: its own network and processes where the system allows.

Everything here runs in the process of the grader, before any code of the user, except Limits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# flags of unshare(2), from linux/sched.h
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

# of prctl(2) and capabilities(7)
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
FILES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
FIRST_USER = 1_000_000_000
"""Numbers of users from here on belong to nobody; distributions assign them below 2^29."""
SLACK = 2
"""Where all processes of a user are counted: times as many as there are now, and the limit on top."""


@dataclass(frozen=True)
class Limits:
    """Limits of one grader's process.

    seconds       of one answer, by the clock and of CPU; enforced by the parent
    load_seconds  of reading the user's file with all its imports
    memory_bytes  of address space
    processes     processes and threads that it may have at once
    files         open files
    file_bytes    size of a file it writes; what it prints counts
    network       True leaves the network
    port          of the machine's loopback that is reached without a network, too; 0: none
    socket_file   Unix socket of the service on that port
    """

    seconds: float = 10.0
    load_seconds: float = 120.0
    memory_bytes: int = 4 * 2**30
    processes: int = 64
    files: int = 256
    file_bytes: int = 64 * 2**20
    network: bool = False
    port: int = 0
    socket_file: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Confined:
    """Walls that the system granted.

    processes  its processes are in a namespace: none can escape when it is killed
    network    it has no network
    user       it is in a user namespace, where its processes are counted by themselves
    """

    processes: bool = False
    network: bool = False
    user: bool = False

    def as_json(self) -> dict[str, bool]:
        """The fields as plain values."""
        return asdict(self)


def separate(network: bool) -> Confined:
    """Move this process into namespaces of its own; its next child is the first process in them.

    The process must have one thread. Without privileges a user namespace comes first; some systems forbid it.
    """
    unshare = getattr(ctypes.CDLL(None), "unshare", None) if sys.platform == "linux" else None
    if unshare is None:
        return Confined()
    uid, gid = os.geteuid(), os.getegid()
    wanted = [CLONE_NEWPID | CLONE_NEWNET, CLONE_NEWNET, CLONE_NEWPID] if not network else [CLONE_NEWPID]
    for own in (0, CLONE_NEWUSER) if uid == 0 else (CLONE_NEWUSER,):
        for flags in wanted:
            if unshare(flags | own) == 0:
                if own:
                    _map_user(uid, gid)
                return Confined(bool(flags & CLONE_NEWPID), bool(flags & CLONE_NEWNET), bool(own))
    return Confined()


def _map_user(uid: int, gid: int) -> None:
    """Keep the user's and group's number in the new user namespace (user_namespaces(7))."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            Path("/proc/self", name).write_text(line)
        except OSError:
            pass


def confine(limits: Limits, confined: Confined) -> None:
    """Set the limits of this process and of all it starts."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.files)
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    # counted by user: by themselves in a user namespace, and for a user who has nothing else
    alone = confined.user or (os.geteuid() == 0 and _leave_root())
    _limit(resource.RLIMIT_NPROC, limits.processes + (0 if alone else SLACK * _tasks_of_user()))
    end_with_parent()


def end_with_parent() -> None:
    """Let this process end with the one that started it; without Linux, others see to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _leave_root() -> bool:
    """Become a user who has no other process, and can read and write every file still. -> False: stay root.

    Linux never counts root's processes against a limit, so a fork bomb of root stops the machine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then those of capabilities from 32 on
    if not hasattr(libc, "capget") or libc.capget(header, held) or held[1] & FILES != FILES:
        return False
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    try:
        os.setresuid(*[FIRST_USER + int.from_bytes(os.urandom(3), "little")] * 3)
    except OSError:  # the numbers of users are limited in this container
        return False
    libc.capset(header, (ctypes.c_uint32 * 6)(FILES, FILES, FILES, 0, 0, 0))
    for capability in range(FILES.bit_length()):
        if FILES >> capability & 1:  # kept by programs that it starts, too
            libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)
    return True


def _tasks_of_user() -> int:
    """Count the threads of all processes of this user; 0 without /proc."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:  # it has ended
            continue
    return count


def _limit(kind: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):  # such as RLIMIT_AS on macOS
        pass


def allow_cpu(seconds: float) -> None:
    """Allow this process that many more seconds of CPU; then SIGXCPU ends it."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def tasks_below() -> int:
    """Count the threads of all processes that descend from this one; 0 if the system does not list them.

    Orphans in a process namespace descend from its first process, so none is missed there.
    """
    count, waiting = 0, _children("self")
    while waiting and count < 100_000:
        pid = waiting.pop()
        try:
            count += len(os.listdir(f"/proc/{pid}/task"))
            waiting += _children(pid)
        except OSError:  # it has ended
            continue
    return count


def _children(pid: str) -> list[str]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [
            child for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except OSError:
        return []
