"""torchrun in a fork of what forkserver.py has imported, and its workers too, each a process and session of its own:
starting Python and importing torch five times takes longer than the run. Run as a script, with torchrun's words."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_spec = importlib.util.spec_from_file_location("forkserver", Path(__file__).parents[1] / "forkserver.py")
assert _spec is not None and _spec.loader is not None
forkserver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(forkserver)


class Workers(forkserver.ForkServer):
    """Forks workers, which write where torchrun does; it begins before torchrun has a thread."""

    def __init__(self) -> None:
        asking, answering = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(asking[1])
            forkserver.answer_all(os.fdopen(asking[0], "r"), os.fdopen(answering[1], "w"))
            os._exit(0)
        os.close(asking[0])
        os.close(answering[1])
        self.process = SimpleNamespace(stdin=os.fdopen(asking[1], "w"), stdout=os.fdopen(answering[0], "r"))

    def popen(self, words: tuple[str, ...], env: dict[str, str]) -> Any:
        """As torchrun's Popen of `python -u SCRIPT WORDS`."""
        python, unbuffered, *script = words
        assert (python, unbuffered) == (sys.executable, "-u")
        asked = {"start": script, "env": env, "cwd": os.getcwd(), "files": [], "session": True}
        return forkserver.Started(self, self.ask(**asked), Path(os.devnull), Path(os.devnull))


if __name__ == "__main__":
    workers = Workers()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda handler, words, env: workers.popen(words, env)
    run.main(sys.argv[1:])
