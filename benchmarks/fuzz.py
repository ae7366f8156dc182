"""Thousands of broken inputs for every reader: each is accepted whole or refused with one UserError; never a
traceback, a hang, or a file opened outside its folder.

    python benchmarks/fuzz.py --inputs 10000 --seed 0
    python benchmarks/fuzz.py --inputs 20000 --seed 1000000 2000000

Prints per reader: inputs, accepted, refused by class of error, tracebacks, hangs, files opened outside. The
generators are those of the property tests (tests/fuzz/fuzzers.py). Repeat one finding: --only READER:SEED.
Exit code 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from itertools import count, islice
from pathlib import Path
from random import Random
from types import FrameType, ModuleType

SECONDS = 10  # an input that takes longer counts as a hang; the usual one takes 10 ms
# bytes of address space beyond what is mapped at the start: a reader that wants more counts as a traceback
MEMORY = 8 * 2**30


class Hang(BaseException):
    """Raised by the alarm; no reader catches it."""


def fuzzers() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "tests" / "fuzz" / "fuzzers.py"
    spec = importlib.util.spec_from_file_location("fuzzers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzzers"] = module
    spec.loader.exec_module(module)
    return module


class Watch:
    """Record the files outside the input's folder that are opened while it is read: those in /etc, and those
    under the sandbox's root but not in that folder."""

    def __init__(self, root: Path):
        self.root, self.folder = str(root), None
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self.folder is not None and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(("/etc/", self.root + os.sep)) and not path.startswith(self.folder + os.sep):
                self.outside.append(path)


def on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hang(f"{SECONDS} s")


def one(module: ModuleType, reader: str, seed: int, root: Path, watch: Watch) -> str:
    """The outcome of one input: "accepted", the class of a UserError, "traceback", "hang" or "outside"."""
    folder = root / "input"
    for old in (folder, root / "outside"):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir()
    fuzzer = module.READERS[reader]
    fuzzer.plant(Random(f"{reader}:{seed}"), folder)
    watch.folder, watch.outside = str(folder), []
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = module.attempt(
                module.Reader(reader, lambda random, where: None, fuzzer.read), Random(0), folder
            )
    except Hang:
        outcome = "hang"
        traceback.print_exc(limit=-6)
    except (Exception, SystemExit):
        outcome = "traceback"
        traceback.print_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.folder = None
    if watch.outside:
        print(f"opened outside: {watch.outside[:3]}", file=sys.stderr)
        outcome = "outside"
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="over all readers and seeds together")
    parser.add_argument(
        "--seed",
        type=int,
        nargs="+",
        default=[0],
        help="input i of a reader is made from the text READER:(seed + i)",
    )
    parser.add_argument("--reader", action="append", help="only this one (may be given again)")
    parser.add_argument("--only", metavar="READER:SEED", help="one input again")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    module = fuzzers()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, on_alarm)
    readers = arguments.reader or list(module.READERS)
    endless = ((name, seed + i) for i in count() for seed in arguments.seed for name in readers)
    cases = list(islice(endless, arguments.inputs))
    if arguments.only:
        reader, _, seed = arguments.only.partition(":")
        arguments.seed, cases = [int(seed)], [(reader, int(seed))]
    started, counts = time.perf_counter(), {name: Counter[str]() for name, _ in cases}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(os.path.realpath(folder))
        watch = Watch(root)
        for reader, seed in cases:
            outcome = one(module, reader, seed, root, watch)
            counts.setdefault(reader, Counter())[outcome] += 1
            if outcome in ("traceback", "hang", "outside"):
                print(f"^ {outcome}: --only {reader}:{seed}\n", file=sys.stderr)
    return report(counts, len(cases), arguments.seed, time.perf_counter() - started)


def report(counts: dict[str, Counter[str]], inputs: int, seeds: list[int], seconds: float) -> int:
    columns = sorted(
        {outcome for outcomes in counts.values() for outcome in outcomes}
        - {"accepted", "traceback", "hang", "outside"}
    )
    columns = ["accepted", *columns, "traceback", "hang", "outside"]
    print(
        "  ".join(
            [f"{'reader':<12}", f"{'inputs':>8}", *(f"{name:>{max(8, len(name))}}" for name in columns)]
        )
    )
    total: Counter[str] = sum(counts.values(), Counter())
    for name, outcomes in [*counts.items(), ("all", total)]:
        print(
            "  ".join(
                [
                    f"{name:<12}",
                    f"{outcomes.total():>8,}",
                    *(f"{outcomes[c]:>{max(8, len(c))},}" for c in columns),
                ]
            )
        )
    findings = total["traceback"] + total["hang"] + total["outside"]
    each = -(-inputs // (len(counts) * len(seeds)))
    print(
        f"{inputs:,} inputs, of each reader {each:,} from seed {', '.join(map(str, seeds))}; {seconds:.0f} s:"
        f" {findings} findings"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
