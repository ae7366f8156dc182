"""The process of a grader: python -u -m unfreeze.rollout.child LIMITS FOLDER.

FOLDER is its own, made for it; it is removed when the parent is gone.

stdin gives requests, stdout takes replies, one JSON object a line; both are moved away before any code of the
user runs, which finds an empty stdin, and its output in the file that is stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from unfreeze.core.errors import ConfigError, nearest, printable
from unfreeze.rollout import relay
from unfreeze.rollout.apart import apart
from unfreeze.rollout.held import Held
from unfreeze.rollout.limits import Confined, Limits, allow_cpu, confine, separate, tasks_below
from unfreeze.rollout.reward import MAX_MESSAGE, Graded, score
from unfreeze.rollout.signature import signature_of
from unfreeze.untrusted.json_object import is_object

CROWDED = 125
"""Exit code: killed, because it had too many processes."""
BY_SIGNAL = 128
"""Exit codes above this: ended by the signal of that number less this, as shells say it."""
WATCH = 0.1  # seconds between two counts of its processes

Reply = dict[str, Any]


EMPTY_FOLDER = "graders run in an empty folder: open files by their full path"


def main(limits: Limits, folder: str) -> NoReturn:
    """Confine this process, start the one that grades, and watch it until it ends."""
    asking, answering = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    confined = separate(limits.network)
    if confined.processes:
        if first := os.fork():
            os.close(asking)
            os.close(answering)
            _on_term(lambda: os.kill(first, signal.SIGKILL))
            os._exit(_code(os.waitpid(first, 0)[1]))
        os.setpgid(0, 0)  # what the user's code sends to its group does not reach the process above
    if limits.port and confined.network:
        relay.start(limits.port, limits.socket_file)
    if (pid := os.fork()) == 0:
        _serve(asking, answering, limits, confined)
    os.close(answering)
    _watch(pid, asking, limits, confined, folder)


def _on_term(end: Callable[[], None]) -> None:
    """On SIGTERM, the parent's sign to stop, end what is below; this process waits for it, then ends itself.

    A process that dies before those below it would leave them to init, which may never wait for them.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            end()

    signal.signal(signal.SIGTERM, handle)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else BY_SIGNAL - code


def _watch(pid: int, asking: int, limits: Limits, confined: Confined, folder: str) -> NoReturn:
    """Wait for the grading process; end all if the parent is gone, or if there are too many processes.

    In a namespace all end with this process, which is its first; else the group of the grading process does.
    """

    def end() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL) if confined.processes else os.killpg(pid, signal.SIGKILL)

    if not confined.processes:
        with suppress(OSError):
            os.setpgid(pid, pid)
        _on_term(end)
    hears = select.poll()
    hears.register(asking, 0)  # only the end of the other side is reported
    if hasattr(os, "pidfd_open"):
        hears.register(os.pidfd_open(pid), select.POLLIN)
    while True:
        while True:  # in a namespace, orphans of others are waited for here, too
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(1)
            if ended == pid:
                end()  # what it left behind
                if any(fd == asking for fd, _ in hears.poll(0)):  # it may see that the parent is gone first
                    _remove(folder)
                os._exit(_code(status))
            if not ended:
                break
        if tasks_below() > limits.processes:
            end()
            os._exit(CROWDED)
        if any(fd == asking for fd, _ in hears.poll(WATCH * 1000)):
            end()
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            _remove(folder)
            os._exit(1)


def _remove(folder: str) -> None:
    """Remove this grader's folder, and that of all graders once it is empty: the parent cannot any more."""
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.rmdir(os.path.dirname(folder))


def _serve(asking: int, answering: int, limits: Limits, confined: Confined) -> NoReturn:
    """Answer requests until there are no more, or until one leaves threads or processes behind."""
    if not confined.processes:
        os.setpgid(0, 0)
    confine(limits, confined)
    grader, own = Grader(), os.getpid()
    with os.fdopen(asking, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            allow_cpu(request["seconds"])
            reply = grader(request)
            if os.getpid() != own:  # a fork of the user's code, which must not answer
                os._exit(0)
            leaves = request["do"] == "grade" and _left_behind()  # an environment may keep some
            reply |= {"token": request["token"], "leaves": leaves, "confined": confined.as_json()}
            _send(answering, reply)
            if reply["leaves"]:
                break
    os._exit(0)


def _send(answering: int, reply: Reply) -> None:
    rest = json.dumps(reply, allow_nan=False).encode() + b"\n"
    while rest:
        rest = rest[os.write(answering, rest) :]


def _left_behind() -> bool:
    """True if threads or processes of the last request are still there."""
    if threading.active_count() > 1:
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Grader:
    """The user's functions, and the answer to each request."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.files: set[str] = set()
        self.held = Held(_awaited, self.in_words)

    def __call__(self, request: Mapping[str, Any]) -> Reply:
        """Answer one request; whatever the user's code raises is an outcome."""
        if request["do"] == "turn":
            return self.held.turn(request)
        folder = tempfile.mkdtemp()
        try:
            os.chdir(folder)
            does = {"load": self.load, "meet": self.load, "grade": self.grade, "run": self.run}
            return does[request["do"]](request)
        finally:
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, request: Mapping[str, Any]) -> Reply:
        """Make the functions or environments. -> facts about them, or the refusal and its remedy."""
        try:
            sys.path[:0] = [path for path in request["paths"] if path not in sys.path]
            if request["do"] == "meet":
                factories: dict[str, Any] = {}
                for key, code in zip(request["names"], request["codes"], strict=True):
                    self.files.add(code["path"])
                    factories |= _factories(key, code)
                return self.held.meet(factories)
            for code in request["codes"]:
                self.files.add(code["path"])
                for name, function in _named(code).items():
                    if inspect.isclass(function) and callable(getattr(function, "reset", None)):
                        where = f"{os.path.basename(code['path'])}:{name}"
                        raise ConfigError(
                            f"{name} is an environment, not a function of a prompt and an answer",
                            next=f"--env {where}",
                        )
                    twice = name in self.functions
                    self.functions[f"{code['path']}:{name}" if twice else name] = function
            shape = request.get("arguments", {})
            signatures = [signature_of(name, each, **shape) for name, each in self.functions.items()]
            return {"signatures": [signature.as_json() for signature in signatures]}
        except ConfigError as error:
            return {"refused": error.message, "next": error.next}
        except BaseException as error:
            words = f"the file cannot be loaded: {self.in_words(error)}"
            missing = isinstance(error, FileNotFoundError)
            return {"refused": words, "next": EMPTY_FOLDER if missing else ""}

    def grade(self, request: Mapping[str, Any]) -> Reply:
        """Call every function with one answer. -> the fields of a Graded."""
        texts = request["prompt"], request["completion"]
        return self._scored(
            {
                name: partial(self.functions[name], *texts, **keywords)
                for name, keywords in request["keywords"].items()
            }
        )

    def run(self, request: Mapping[str, Any]) -> Reply:
        """Call the agent many times at once, each in a fork of this process. -> their Graded's fields."""
        ((name, agent),) = self.functions.items()
        for variable in ("NO_PROXY", "no_proxy"):  # a client's proxy does not lead to this machine's endpoint
            os.environ[variable] = f"127.0.0.1,{os.environ.get(variable, '')}".rstrip(",")

        def call(number: int, base_url: str, row: Mapping[str, Any]) -> Reply:
            os.mkdir(str(number))
            os.chdir(str(number))
            return self._scored({name: partial(agent, base_url, row)})

        runs = enumerate(request["runs"])
        calls = [partial(call, number, each["base_url"], each["row"]) for number, each in runs]
        return {"graded": apart(calls, request["each"])}

    def _scored(self, calls: Mapping[str, Callable[[], Any]]) -> Reply:
        """Call each function. -> the fields of a Graded; whatever they raise is its outcome."""
        try:
            return score({name: _awaited(call()) for name, call in calls.items()}).as_json()
        except MemoryError as error:
            return Graded(None, outcome="memory", message=self.in_words(error)).as_json()
        except BaseException as error:
            return Graded(None, outcome="error", message=self.in_words(error)).as_json()

    def in_words(self, error: BaseException) -> str:
        """Return an error as one line, with the last line of the user's file that it passed."""
        at = _line(error.__traceback__, self.files)
        try:
            text = str(error)[:MAX_MESSAGE]
        except BaseException:  # its own __str__ may raise
            text = ""
        return printable(f"{type(error).__name__}{': ' if text else ''}{text}{at}")[:MAX_MESSAGE]


def _factories(key: str, code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factories of environments by name; a dict in the file has several."""
    factories: dict[str, Any] = {}
    for value in _named(code, dict).values():
        factories |= {str(name): each for name, each in value.items()} if is_object(value) else {key: value}
    return factories


def _named(code: Mapping[str, Any], other: type | None = None) -> dict[str, Any]:
    """Return the functions of a UserCode by name; a value of type `other` will do, too.

    Raises ConfigError if there is none of a name.
    """
    file = os.path.basename(code["path"])
    if code["module"]:
        module = __import__(code["module"], fromlist=["_"])
    else:
        stem = f"_user_{os.path.splitext(file)[0]}"
        module = ModuleType(stem)
        module.__file__ = code["path"]
        sys.modules[stem] = module
        sys.path.insert(0, os.path.dirname(code["path"]))
        exec(compile(code["text"], code["path"], "exec", dont_inherit=True), vars(module))
    result: dict[str, Any] = {}
    for name in code["names"]:
        try:
            result[name] = attrgetter(name)(module)
        except AttributeError:
            own = [
                each
                for each, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module.__name__
            ]
            there = f"; it has {', '.join(own[:20])}" if own else "; it has no function"
            raise ConfigError(
                f"{file} has no function {name!r}{nearest(name, own)}{there}",
                next=f"{file}:{own[0]}" if own else f"def {name}(prompt, completion, **row): return 1.0",
            ) from None
        if not callable(result[name]) and not (other and isinstance(result[name], other)):
            raise ConfigError(f"{file}: {name} is a {type(result[name]).__name__}, not a function")
    return result


def _awaited(value: Any) -> Any:
    """Return the value; of an async function, once it is there."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _line(traceback: TracebackType | None, files: set[str]) -> str:
    at = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file in files:
            at = f" ({os.path.basename(file)}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return at


if __name__ == "__main__":
    main(Limits(**json.loads(sys.argv[1])), sys.argv[2])
