"""Measure how much training survives a merge: tiny-k2 learns to answer like Yoda at three learning rates.

    python benchmarks/merge_curve.py --write docs/measured/merge.md      # 6 runs of 2 minutes, 18 merges

If it is stopped, the same command resumes it: runs and merges are in --folder.

Adapters sit on every linear layer, as in `unfreeze demo`, or on the INT4 experts alone. Each run is merged in
the base's own formats with new scales and with kept ones, and in bf16. Every merged folder answers the demo's
held-out questions through transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.evaluate.style import style_scores
from unfreeze.parallel.machine import hardware

RATES = ("1e-4", "3e-4", "1e-3")
TARGETS = ("all-linear", "experts")
WAYS = (("same", "refit"), ("same", "keep"), ("bf16", "refit"))
EPOCHS = 4
QUESTIONS = [json.loads(line) for line in (TINY_K2 / "held_out.jsonl").read_text().splitlines()]
HEAD = """# Merge: how much of the training survives

`python benchmarks/merge_curve.py --write docs/measured/merge.md`, {date}, {machine}: tiny-k2 (Kimi-K2's
architecture, INT4 experts in groups of 32, other weights bf16), trained to answer like Yoda as in `unfreeze
demo` ({epochs} epochs, a tenth of the rows held out, LoRA of rank 16), then merged. The columns are
explained in [merge](../reference/merge.md#rounding-figures). Yoda and facts: per cent of {questions}
held-out questions that the merged folder answers, through transformers' `DeepseekV3ForCausalLM`, with one
Yoda sentence, and with the right fact (before training: 0 % and 100 %).

"""
COLUMNS = (
    "adapters on",
    "learning rate",
    "experts' ‖ΔW‖/‖W‖",
    "merged",
    "experts: size × cosine = ΔW kept",
    "held-out loss: base, adapter, merged",
    "gain kept",
    "Yoda",
    "facts",
)


def command(*words: object) -> dict[str, Any]:
    """Run `unfreeze …` in this process and return its JSON result."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = cli.main([*map(str, words), "--json", "--quiet"])
    assert code == 0, f"unfreeze {' '.join(map(str, words))} ended with {code}"
    return json.loads(output.getvalue().splitlines()[-1])


def trained(folder: Path, rate: str, targets: str) -> Path:
    """Train as the demo does, for fewer epochs and with rows held out."""
    out = folder / f"{targets}-{rate}"
    words = f"--epochs {EPOCHS} --tokens-per-step 1024 --optimizer.weight-decay 0.3 --dtype float32"
    words += " --place.recompute nothing --threads 1 --watch.samples 0 --rank 16"
    words += f" --lora.alpha 32 --lora.targets {targets} --validation-fraction 0.1 --learning-rate {rate}"
    data = TINY_K2 / "yoda_train.jsonl"
    command("sft", "--model", TINY_K2, "--data", data, "--out", out, *words.split())
    return out


@torch.no_grad()
def answers(folder: Path) -> list[str]:
    """Greedy answers of transformers' model of a folder to the held-out questions, in one batch."""
    ours = unfreeze.load(folder, dtype="float32")
    prompts = [ours.encode_chat(item["question"]) for item in QUESTIONS]
    longest, pad = max(map(len, prompts)), 1535
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    config = transformers.DeepseekV3Config.from_pretrained(folder)
    config.model_type = "deepseek_v3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    for parameter in model.parameters():  # experts are expanded to bf16; wider, the numbers are the same
        parameter.data = parameter.data.float()
    ends = sorted(ours.tokenizer.eos_ids)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 48,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }
    generated = model.generate(input_ids=ids, attention_mask=mask, **options)[:, longest:].tolist()
    cut = [row[: next((i for i, id in enumerate(row) if id in {*ends, pad}), len(row))] for row in generated]
    return [ours.tokenizer.decode(row) for row in cut]


def rows(folder: Path) -> list[tuple[str, ...]]:
    """A row per run and way of merging."""
    lines = []
    for targets in TARGETS:
        for rate in RATES:
            run = trained(folder, rate, targets)
            for to, scales in WAYS:
                out = folder / "merged" / f"{run.name}-{to}-{scales}"
                result = command("merge", run, "--to", to, "--scales", scales, "--out", out)
                experts, gain = result["rounding"]["experts"], result["gain"]
                way = experts["ways"][experts["written"][0]]
                scored = style_scores(answers(out), QUESTIONS)
                losses = f"{gain['base']:.3f}, {gain['adapter']:.3f}, {gain['merged']:.3f}"
                lines.append(
                    (
                        targets,
                        rate,
                        f"{experts['change']:.4f}",
                        to if to == "bf16" else f"{to}, scales {scales}",
                        f"{way['size']:.2f} × {way['cosine']:.2f} = {way['kept']:.2f}",
                        losses,
                        f"{100 * gain['share']:.1f} %",
                        f"{scored['style']:.0f} %",
                        f"{scored['facts']:.0f} %",
                    )
                )
                print(" | ".join(lines[-1]), flush=True)
    return lines


def page(lines: list[tuple[str, ...]]) -> str:
    head = HEAD.format(date=date.today(), machine=hardware().name, epochs=EPOCHS, questions=len(QUESTIONS))
    table = [COLUMNS, ("---",) * len(COLUMNS), *lines]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/merge-curve"))
    arguments = parser.parse_args()
    text = page(rows(arguments.folder))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
