"""Measure one thing beside its peers in the same run, and keep what was found as rows.

`unfreeze dev bench WHAT` appends its rows to benchmarks/results/<device>.jsonl.
`unfreeze dev bench WHAT --help` says what it does, how long it takes and its flags.
`unfreeze dev bench report` writes docs/measured/performance.md from the committed rows.
"""

from __future__ import annotations

import importlib
from typing import Any

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest

BENCHMARKS = {
    "hybrid": "LoRA on a hybrid with a recurrent state and INT4 experts, beside transformers + peft",
    "moe": "LoRA on every expert of an INT4 checkpoint, beside transformers + peft",
    "formats": "training steps with experts in FP8 and MXFP4, beside INT4's",
    "dense": "full fine-tuning of the Qwen2-0.5B shape in bf16, beside transformers",
    "recompute": "LoRA on the Qwen3-0.6B shape, with what is recomputed chosen or named",
    "load": "opening a checkpoint, beside a raw read of its files",
    "start": "seconds from Enter to the first training step, the first time and after it",
    "data": "rows a second from data files to tokens, beside datasets.map with transformers' template",
    "tokenizer": "training a tokenizer on Chinese, beside the library's own split into words",
    "store": "random reads of the token store, beside what a training step needs",
    "decode": "generation from the INT4 checkpoint, beside transformers' generate",
    "mixed": "answers of mixed lengths, as rollouts have them, beside transformers' generate",
    "serve": "tokens a second to one client of 16 and 64 streams, beside transformers serve",
    "growth": "time and memory per token from 4 k to 64 k tokens per step, beside what the plan states",
    "beyond": "training a checkpoint larger than the memory allowed, experts from disk",
    "equal": "runs on several processes, beside the run of one: outputs, gradients and losses",
    "layer": "one true Kimi-K2 layer on a GPU, beside the predictions",
    "model": "LoRA training of whole models of real shape on a GPU",
    "plan": "what the plan states of twenty small runs, beside what they took",
    "teach": "a student of a language whose probabilities are known, with and without its teacher",
    "prefer": "tiny-k2 taught Yoda by pairs of answers, beside fine-tuning: style, facts, memory",
    "inside": "layers compared with a teacher's, beside its words alone, where the language is known",
    "profile": "where the time of a job's step goes, per op, beside the machine's GEMM rate",
    "report": "docs/measured/performance.md from the committed rows",
}


def usage() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  unfreeze dev bench {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items()]
    return "\n".join([(__doc__ or "").strip(), "", *lines])


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Run the benchmark -> its rows, and the file they were appended to."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return {}
    if not arguments or arguments[0] not in BENCHMARKS:
        got = f"{arguments[0]!r}{nearest(arguments[0], BENCHMARKS)}" if arguments else "nothing"
        raise ConfigError(
            f"bench takes one of {', '.join(BENCHMARKS)}; got {got}", next="unfreeze dev bench --help"
        )
    from benchmarks.harness import case, report

    if arguments[0] == "report":
        return report.main(arguments[1:], common)
    module = importlib.import_module(f"benchmarks.cases.{arguments[0]}")
    return case.run(arguments[0], module, arguments[1:], common)
