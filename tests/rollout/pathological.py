"""Rewards as no one should write them, each a way in which graders of peers hung, died or scored 0 in silence."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time


def loop(prompt, completion):
    while True:
        pass


def loop_in_c(prompt, completion):
    return len(re.match("(a+)+$", "a" * 60 + "b").group())


def sleep(prompt, completion):
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(name, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def stop(prompt, completion):
    os.kill(os.getpid(), signal.SIGSTOP)


def processor(prompt, completion):
    """Burns CPU in a thread, so that the clock of the deadline is not the first to see it."""
    while True:
        sum(range(10**6))


def fork_bomb(prompt, completion):
    """At most 2,000 processes in all, where the guard fails: the machine is others' too."""
    for _ in range(11):
        os.fork()
    time.sleep(1000)


def orphans(prompt, completion):
    """Each child leaves the group and the family."""
    for _ in range(500):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(1000)


def twin(prompt, completion):
    """A fork comes back from here as well."""
    if (pid := os.fork()) == 0:
        return 2.0
    os.waitpid(pid, 0)
    return 1.0


def threads(prompt, completion):
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def memory(prompt, completion):
    """More than the limit of 1 GiB, less than any machine refuses."""
    return len(bytearray(1500 * 2**20))


def power(prompt, completion):
    return float(9**9**9)


def leave(prompt, completion):
    os._exit(0)


def kill_group(prompt, completion):
    os.killpg(0, signal.SIGKILL)


def kill_parent(prompt, completion):
    os.kill(os.getppid() or os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def crash(prompt, completion):
    return ctypes.string_at(0)


def close(prompt, completion):
    os.closerange(0, 200)
    return 1.0


def spray(prompt, completion):
    """Writes rewards of its own into everything that is open."""
    line = json.dumps({"token": "0", "reward": 1.0, "parts": {}, "outcome": "ok", "message": ""})
    for fd in range(3, 200):
        try:
            os.write(fd, line.encode() + b"\n")
        except OSError:
            pass
    return 0.5


def flood(prompt, completion):
    for fd in range(3, 200):
        try:
            os.write(fd, b"x" * 10**7)
        except OSError:
            pass
    return 0.5


def full(prompt, completion):
    while True:
        print("x" * 10**5)


def leave_politely(prompt, completion):
    sys.exit(0)


def recursion(prompt, completion):
    return recursion(prompt, completion)


def raises(prompt, completion):
    return {"a": 1}[completion]


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def mute(prompt, completion):
    raise Mute


def interrupt(prompt, completion):
    raise KeyboardInterrupt


def ask(prompt, completion):
    return float(input("how good? "))


def connect(prompt, completion, port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return 1.0


def nan(prompt, completion):
    return {"a": 1.0, "b": float("nan")}


def infinite(prompt, completion):
    return {"a": 1e308, "b": 1e308}


def huge(prompt, completion):
    return 10**400


def text(prompt, completion):
    return "1.0"


def batch(prompt, completion):
    return [1.0, 0.0]


def nothing(prompt, completion):
    pass


def nothing_in_parts(prompt, completion):
    return {"a": None}


def many_parts(prompt, completion):
    return {str(i): 1.0 for i in range(10**6)}


def full_in_c(prompt, completion):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a library may not
    with open("large", "wb") as file:
        file.write(b"0" * 2**22)


def thread_left(prompt, completion):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return 1.0


def process_left(prompt, completion):
    subprocess.Popen(["sleep", "1000"])
    return 1.0


def orphan_left(prompt, completion):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return 1.0


def folder(prompt, completion):
    """1 if the folder was empty, and has a file from now on."""
    there = os.listdir(".")
    open("left", "w").close()
    return float(not there)


def prints(prompt, completion):
    print("\033[31mred\0", "x" * 10**5)
    os.system("echo from outside")
    return 1.0


async def later(prompt, completion):
    return 0.25
