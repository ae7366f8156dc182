"""Train a byte-level BPE tokenizer on Chinese, beside the library's own split into words.

`unfreeze dev bench tokenizer`, about 3 minutes. Both sides are of the library `tokenizers`, on the same
documents and with as many merges, in turn, each in a fresh process with all cores. Without --data the text is
drawn (benchmarks/harness/chinese.py). Seconds are from the file to the tokenizer and its held-out bytes per
token.
"""

import statistics
import tempfile
from pathlib import Path

from pydantic import Field

from benchmarks.harness.case import Measured, Run, pick
from benchmarks.harness.chinese import write_chinese
from benchmarks.harness.fresh import call
from unfreeze.config.parse import Folder
from unfreeze.parallel.machine import num_cores

SIDES = {"unfreeze": "train", "the library's split": "plain"}


class Config(Measured):
    megabytes: float = Field(default=10, gt=0, description="size of the drawn text, in millions of bytes")
    vocab: int = Field(default=8192, ge=330, description="number of ids")
    pairs: int = Field(default=3, ge=1, description="runs of each side, in turn; the median counts")
    data: Folder = Field(default="", description="a data file with text, instead of the drawn text")


def rows(config: Config, run: Run):
    replies = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(config.data or f"{folder}/drawn.jsonl")
        if not config.data:
            write_chinese(file, 1e6 * config.megabytes)
        for number in range(config.pairs):
            for side, function in SIDES.items():
                options = {"file": str(file), "vocab": config.vocab, "out": f"{folder}/{function}{number}"}
                reply = call(f"benchmarks.harness.chinese:{function}", options, Path(folder), parallel=True)
                replies[side].append(reply)
                run.say(f"{number + 1}/{config.pairs}: {side} {reply['seconds']:.1f} s")
    seconds = {side: statistics.median(reply["seconds"] for reply in runs) for side, runs in replies.items()}
    settings = pick(config, "vocab", "pairs") | {"data": Path(config.data).name, "cores": num_cores()}
    for side, runs in replies.items():
        ratio, rate = seconds[side] / seconds["unfreeze"], runs[0]["bytes_per_token"]
        note = f"{seconds[side]:.1f} s for {runs[0]['bytes'] / 1e6:.1f} MB, {ratio:.2f} x the first side's;"
        note += f" held out {rate:.3f} bytes per token"
        results = {"seconds": seconds[side], "of_first_side": ratio, "bytes_per_token": rate, "note": note}
        yield run.row(side, settings, results | {"bytes": runs[0]["bytes"]})
