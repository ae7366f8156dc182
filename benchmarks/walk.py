"""How many functions of unfreeze a run enters between `main` and its first optimizer step.

    python benchmarks/walk.py [--show]        sft on tiny-k2, its own sample rows, one thread

Distinct functions of the main thread; comprehensions, lambdas and the bodies of classes are left out. Nothing
is cached from before.
--show: by room.
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
    """The first optimizer step begins."""


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
    given = options.parse_args()
    os.environ["UNFREEZE_KERNELS"] = "records"  # what is timed hangs on the machine
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rows = str(TINY_K2 / "yoda_train.jsonl")
        command = ["sft", "--model", str(TINY_K2), "--data", rows, "--out", f"{folder}/run", "--steps", "1"]
        found = entered([*command, "--threads", "1", "--watch.samples", "0", "--quiet"])
    print(f"{len(set(found))} functions in {len({file for file, _ in found})} files")
    if given.show:
        for room, count in Counter(file.partition("/")[0] for file, _ in found).most_common():
            print(f"{count:5}  {room}")


if __name__ == "__main__":
    main()
