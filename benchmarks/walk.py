"""Count the functions of unfreeze that a run enters between `main` and its first optimizer step.

    python benchmarks/walk.py [--show]        sft on tiny-k2, its own sample rows, one thread

Distinct functions of the main thread; comprehensions, lambdas and the bodies of classes are left out. Caches
are empty.
--show: counts by folder of the package.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import unfreeze
from unfreeze import cli

PACKAGE = Path(unfreeze.__file__).parent
TINY_K2 = PACKAGE / "assets" / "tiny-k2"
LAST = ("train/optim.py", "AdamW.update")


class Reached(BaseException):
    """Raised when the first optimizer step starts."""


def entered(arguments: list[str]) -> list[tuple[str, str]]:
    """(file below the package, name) of every function entered, in order of its first call."""
    seen: dict[CodeType, tuple[str, str]] = {}
    root = str(PACKAGE) + "/"

    def look(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not code.co_filename.startswith(root):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or of a class
            return
        seen[code] = name = (code.co_filename.removeprefix(root), code.co_qualname)
        if name == LAST:
            raise Reached

    sys.setprofile(look)
    try:
        cli.main(arguments)
    except Reached:
        pass
    finally:
        sys.setprofile(None)
    if LAST not in seen.values():
        raise SystemExit("no optimizer step was reached")
    unnamed = ("<lambda>", "comp>", "<genexpr>")
    return [name for name in seen.values() if not name[1].endswith(unnamed)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--show", action="store_true")
    arguments = options.parse_args()
    os.environ["UNFREEZE_KERNELS"] = "records"  # timed choices depend on the machine
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = str(TINY_K2 / "yoda_train.jsonl")
        command = ["sft", "--model", str(TINY_K2), "--data", rows, "--out", f"{folder}/run", "--steps", "1"]
        functions = entered([*command, "--threads", "1", "--watch.samples", "0", "--quiet"])
    print(f"{len(set(functions))} functions in {len({file for file, _ in functions})} files")
    if arguments.show:
        for room, count in Counter(file.partition("/")[0] for file, _ in functions).most_common():
            print(f"{count:5}  {room}")


if __name__ == "__main__":
    main()
