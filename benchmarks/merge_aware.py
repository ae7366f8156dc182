"""Measure what a merge into INT4 keeps of short runs: plain, merge-aware, and with other ways of rounding.

    python -m benchmarks.merge_aware --write docs/measured/merge_aware.md
    python -m benchmarks.merge_aware --cost       # time and memory of a step; on a quiet machine

Two mixtures learn to answer like Yoda: tiny-k2, and a qwen3_moe that is made here from nothing on tiny-k2's
corpus. On seed 0 each method tries every rate and chooses the one with the lowest held-out loss of what it
would publish; the other seeds run at this rate. Every finished run is a row in --rows: the same command
continues after a stop, and --write with --only-page writes what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import unfreeze
from benchmarks.merge_aware_page import (
    BY_REWARDS,
    METHODS,
    MIXTURES,
    RATES,
    REWARDED,
    SEEDS,
    STEPS,
    TARGETS,
    Row,
    Rows,
    best,
    page,
)
from benchmarks.merge_curve import QUESTIONS, command
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.files import write_file
from unfreeze.evaluate.style import style_scores
from unfreeze.parallel.machine import hardware

ROOT = Path(__file__).resolve().parents[1]
UNFREEZE = (sys.executable, "-m", "unfreeze")
ROWS = ROOT / "benchmarks" / "results" / "merge_aware"
YODA_REWARD = ROOT / "examples" / "rewards" / "yoda.py"
YODA = TINY_K2 / "yoda_train.jsonl"
KEEP = "--merge-aware int4 --merge-aware-scales keep-change"
ARMS = {
    "plain": "",
    "aware": KEEP,
    "aware from .8": f"{KEEP} --merge-aware-from 0.8",
    "aware, refit": "--merge-aware int4 --merge-aware-scales refit",
}
WAYS = {
    "plain": ("refit", "keep", "keep-change"),
    "aware": ("keep-change",),
    "aware from .8": ("keep-change",),
    "aware, refit": ("refit",),
}
PRETRAINED = 900  # steps of 2,048 tokens for the second mixture: 5.4 passes over the corpus
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "intermediate_size": 384,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def base_of(folder: Path, mixture: str) -> Path:
    """The INT4 base of a mixture; the second one is pretrained in `folder` if it is not there yet."""
    if mixture == "tiny-k2":
        return TINY_K2
    words, out = folder / "words", folder / "pretrained"
    if not (words / "corpus.jsonl").is_file():
        maker = ROOT / "examples" / "tiny-k2" / "generate.py"
        subprocess.run([sys.executable, maker, "--out", words], check=True, stdout=subprocess.DEVNULL)
    wanted = words / "model" / "config.json"
    config = json.loads(wanted.read_text())
    if config["model_type"] != QWEN3_MOE["model_type"]:  # as the generator wrote it
        quantized = {
            **config["quantization_config"],
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        }
        kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        config = QWEN3_MOE | {key: config[key] for key in kept} | {"quantization_config": quantized}
        write_file(wanted, json.dumps(config, indent=2) + "\n")
    if not (out / "model" / "config.json").is_file():
        words_of = f"--steps {PRETRAINED} --tokens-per-step 2048 --sequence-length 256 --learning-rate 3e-3"
        words_of += " --place.recompute nothing --threads 1 --watch.samples 0 --seed 0"
        corpus = words / "corpus.jsonl"
        command("pretrain", "--model", wanted.parent, "--data", corpus, "--out", out, *words_of.split())
    return out / "model"


def trained(folder: Path, base: Path, run: tuple[str, str, int, str, str]) -> Path:
    """Train one arm of (mixture, targets, seed, rate, arm); a run that was stopped goes on."""
    mixture, targets, seed, rate, arm = run
    out = folder / "runs" / f"{mixture}-{targets}-{seed}-{rate}-{arm.replace(' ', '-')}"
    words = f"--steps {STEPS} --tokens-per-step 1024 --dtype float32 --place.recompute nothing --threads 1"
    words += f" --optimizer.weight-decay 0.3 --watch.samples 0 --rank 16 --lora.alpha 32 --seed {seed}"
    words += f" --lora.targets {targets} --validation-fraction 0.1 --learning-rate {rate} {ARMS[arm]}"
    result = command("sft", "--model", base, "--data", YODA, "--out", out, *words.split())
    assert result["finished"], f"{out} was stopped"
    return out


@torch.no_grad()
def answers(folder: Path) -> list[str]:
    """Greedy answers of transformers' model of a folder to the held-out questions, in one batch."""
    ours = unfreeze.load(folder, dtype="float32")
    assert ours.tokenizer is not None
    prompts = [ours.encode_chat(item["question"]) for item in QUESTIONS]
    ends = sorted(ours.tokenizer.eos_ids)
    longest, pad = max(map(len, prompts)), 1535
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    of_k2 = json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k2"
    kind = transformers.DeepseekV3Config if of_k2 else transformers.AutoConfig
    config = kind.from_pretrained(folder)
    if of_k2:
        config.__dict__["model_type"] = "deepseek_v3"  # its class has no name for kimi_k2
    build = transformers.DeepseekV3ForCausalLM if of_k2 else transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = build.from_pretrained(folder, config=config, dtype=torch.float32)
    for parameter in model.parameters():  # experts are expanded to bf16; wider, the numbers are the same
        parameter.data = parameter.data.float()
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 32,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }
    rows = model.generate(input_ids=ids, attention_mask=mask, **options)[:, longest:].tolist()
    cut = [row[: next((i for i, id in enumerate(row) if id in {*ends, pad}), len(row))] for row in rows]
    return [ours.tokenizer.decode(row) for row in cut]


def measure(rows: Rows, folder: Path, run: tuple[str, str, int, str, str]) -> None:
    """Train one arm, merge it in its ways, and add their rows; nothing if they are there."""
    mixture, targets, seed, rate, arm = run
    missing = [
        way
        for way in WAYS[arm]
        if not rows.get(mixture=mixture, targets=targets, seed=seed, rate=rate, arm=arm, way=way)
    ]
    if not missing:
        return
    of = trained(folder, base_of(folder, mixture), run)
    for way in missing:
        rows.add(merged(folder, of, run, way))


def merged(folder: Path, run: Path, of: tuple[str, str, int, str, str], way: str) -> Row:
    """The row of a run that is merged in one way."""
    out = folder / f"merged-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    result = command("merge", run, "--scales", way, "--out", out)
    experts, gain = result["rounding"]["experts"], result["gain"]
    scored = style_scores(answers(out), QUESTIONS)
    shutil.rmtree(out)
    kept = experts["ways"][experts["written"][0]]["kept"]
    measured = gain["base"], gain["adapter"], gain["merged"]
    row = Row(*of, way, *measured, scored["style"], scored["facts"], experts["change"], kept)
    print(row, flush=True)
    return row


def rewarded(rows: Rows, folder: Path, seed: int, rate: str, arm: str) -> None:
    """GRPO from an INT4 model that was warmed up by sft and merged: rewards before and after merging."""
    of = {"mixture": BY_REWARDS, "seed": seed, "rate": rate, "arm": arm}
    missing = [way for way in WAYS[arm] if not rows.get(way=way, **of)]
    if not missing:
        return
    warm, base = folder / "runs" / "warm", folder / "warm"
    if not (base / "config.json").is_file():
        words = "--steps 28 --tokens-per-step 1024 --learning-rate 1e-3 --optimizer.schedule constant"
        words += " --rank 16 --dtype float32 --threads 1 --watch.samples 0 --place.recompute nothing"
        command("sft", "--model", TINY_K2, "--data", YODA, "--out", warm, *words.split())
        command("merge", warm, "--out", base, "--no-check")
    out = folder / "runs" / f"grpo-{seed}-{rate}-{arm.replace(' ', '-')}"
    words = f"--max-new-tokens 32 --reward {YODA_REWARD} --steps {REWARDED} --learning-rate {rate}"
    words += f" --optimizer.schedule linear --dtype float32 --threads 1 --seed {seed} {ARMS[arm]}"
    held_out = TINY_K2 / "held_out.jsonl"
    files = ("--data", YODA, "--validation", held_out, "--out", out)
    result = command("grpo", "--model", base, *files, *words.split())
    assert result["finished"], f"{out} was stopped"
    for way in missing:
        rows.add(merged(folder, out, (BY_REWARDS, "all-linear", seed, rate, arm), way))


def planned(rows: Rows) -> Iterator[tuple[str, str, int, str, str]]:
    """(mixture, targets, seed, rate, arm) in turn; the second part depends on the rows of the first."""
    for rate in RATES:
        for mixture in MIXTURES:
            for targets in TARGETS:
                yield from ((mixture, targets, 0, rate, arm) for arm in ARMS)
    for seed in SEEDS[1:]:
        for mixture in MIXTURES:
            for targets in TARGETS:
                for method, (arm, _) in METHODS.items():
                    if row := best(rows, method, mixture=mixture, targets=targets):
                        yield mixture, targets, seed, row.rate, arm


def cost(rows: Rows, folder: Path) -> None:
    """Seconds of a step and peak memory of each arm, each in a process of its own, into cost.json."""
    lines: list[dict[str, Any]] = []
    for mixture in MIXTURES:
        base = base_of(folder, mixture)
        for targets in TARGETS:
            for arm, flags in ARMS.items():
                if "from" in flags:  # its last steps are those of merge-aware
                    continue
                out = folder / "cost"
                shutil.rmtree(out, ignore_errors=True)
                words = (
                    "--steps 24 --tokens-per-step 1024 --dtype float32 --place.recompute nothing --threads 1"
                )
                words += f" --watch.samples 0 --rank 16 --lora.targets {targets} --quiet {flags}"
                process = subprocess.Popen(
                    [*UNFREEZE, "sft", "--model", base, "--data", YODA, "--out", out, *words.split()],
                    stdout=subprocess.DEVNULL,
                )
                _, status, used = os.wait4(process.pid, 0)
                assert status == 0, f"{mixture} {targets} {arm} ended with {status}"
                events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
                seconds = [event["seconds"] for event in events if event["kind"] == "train"][4:]
                of = {"mixture": mixture, "targets": targets, "arm": arm}
                lines.append(of | {"seconds": statistics.median(seconds), "mib": used.ru_maxrss / 1024})
                print(lines[-1], flush=True)
    record = {
        "date": str(date.today()),
        "machine": hardware().name,
        "rows": lines,
        "answers": answering(folder),
    }
    write_file(rows.path.with_name("cost.json"), json.dumps(record, indent=1) + "\n")


def answering(folder: Path) -> dict[str, float]:
    """Seconds to answer the held-out questions in one batch, best of 5, with the adapter apart and merged."""
    run = trained(folder, TINY_K2, ("tiny-k2", "all-linear", 0, RATES[0], "plain"))
    whole = folder / "answering"
    shutil.rmtree(whole, ignore_errors=True)
    command("merge", run, "--no-check", "--out", whole)
    questions = [item["question"] for item in QUESTIONS]
    seconds: dict[str, float] = {}
    for name, source in (("adapter kept apart", run), ("merged", whole)):
        model = unfreeze.load(source, dtype="float32")
        times: list[float] = []
        for _ in range(6):
            started = time.perf_counter()
            model.chat_batch(questions, max_new_tokens=32)
            times.append(time.perf_counter() - started)
        seconds[name] = min(times[1:])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to write")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/merge-aware"), help="runs and the second base"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of rows.json")
    parser.add_argument("--only-page", action="store_true", help="run nothing")
    parser.add_argument(
        "--only", nargs="*", default=[], help="mixtures, targets, seeds, rates and arms to run"
    )
    parser.add_argument("--grpo", nargs="*", metavar="RATE", help="run GRPO at these rates, all seeds, first")
    parser.add_argument("--cost", action="store_true", help="measure time and memory alone")
    arguments = parser.parse_args()
    rows = Rows(arguments.rows)
    if arguments.cost:
        cost(rows, arguments.folder)
    elif not arguments.only_page:
        for rate in arguments.grpo or ():
            for seed in SEEDS:
                for arm in ("plain", "aware"):
                    rewarded(rows, arguments.folder, seed, rate, arm)
        for run in planned(rows):
            if all(word in {str(part) for part in run} for word in arguments.only):
                measure(rows, arguments.folder, run)
    if arguments.write:
        arguments.write.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
