"""The same runs on two checkouts: losses, gradient norms, held-out losses, receipts and written weights must
be bit-identical.

    python benchmarks/golden.py --against GIT_REF            (a worktree of that commit is made and removed)

Five jobs, each in float32 and bfloat16, one thread: sft on INT4 experts, on a dense model, with every weight
trained, pretrain, and two processes. Four in float32 with other kinds of batches: distillation on the
student's own answers, dpo with a live and with a cached reference, and rows in windows. For changes that
must not move a number, such as a refactoring. Exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY_K2 = "src/unfreeze/assets/tiny-k2"
COMMON = [
    "--threads",
    "1",
    "--watch.samples",
    "2",
    "--tokens-per-step",
    "512",
    "--micro-batches",
    "2",
    "--steps",
    "6",
    "--quiet",
    "--validation-fraction",
    "0.2",
    "--watch.validate-every",
    "3",
    "--save-every",
    "3",
    "--place.recompute",  # named: a new default is not a new number
    "selective",
]
COMPARED = {
    "train": ("step", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens", "expert_load"),
    "eval": ("step", "loss", "bits_per_byte", "tokens"),
    "receipt": ("step", "groups"),
    "sample": ("step", "when", "index", "prompt", "text"),
    "plan": ("terms", "total", "adapter_parameters"),
}


def jobs(dense: Path, config: Path) -> Iterator[tuple[str, list[str]]]:
    """name -> the command behind `python -m`."""
    rows = f"{ROOT}/{TINY_K2}/yoda_train.jsonl"
    k2 = ["--model", f"{ROOT}/{TINY_K2}", "--data", rows, "--lora.rank", "4", "--lora.experts-rank", "2"]
    on_dense = ["--model", str(dense), "--data", rows]
    for dtype in ("float32", "bfloat16"):
        more = [*COMMON, "--dtype", dtype]
        yield f"experts {dtype}", ["unfreeze", "sft", *k2, *more]
        yield f"dense {dtype}", ["unfreeze", "sft", *on_dense, "--lora.rank", "4", *more]
        yield f"all {dtype}", ["unfreeze", "sft", *on_dense, "--train", "all", *more]
        yield f"pretrain {dtype}", ["unfreeze", "pretrain", "--model", str(config), "--data", rows, *more]
        torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
        yield f"two processes {dtype}", [*torchrun, "-m", "unfreeze", "sft", *k2, *more]


def more_jobs(dense: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Jobs with other kinds of batches, in float32."""
    rows = f"{ROOT}/{TINY_K2}/yoda_train.jsonl"
    lines = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    more = [*COMMON, "--dtype", "float32"]
    k2, on_dense = ["--model", f"{ROOT}/{TINY_K2}"], ["--model", str(dense), "--lora.rank", "4"]
    teacher = ["--teacher", f"{ROOT}/{TINY_K2}", "--distillation.on-policy", "0.6"]
    yield "own answers", ["unfreeze", "distill", *on_dense, "--data", rows, *teacher, *more]

    pairs = folder / "pairs.jsonl"
    with pairs.open("w", encoding="utf-8") as file:
        for line, other in pairwise(lines):
            pair = {"prompt": line["question"], "chosen": line["answer"], "rejected": other["answer"]}
            if pair["chosen"] != pair["rejected"]:
                file.write(json.dumps(pair) + "\n")
    for reference in ("live", "cached"):
        words = ["--data", str(pairs), "--preference.reference", reference, "--loss", "dpo"]
        yield f"pairs {reference}", ["unfreeze", "prefer", *k2, *words, *more]

    many = folder / "many.jsonl"  # more rows than are read whole
    with many.open("w", encoding="utf-8") as file:
        for number in range(50_010):
            line = lines[number % len(lines)]
            file.write(json.dumps({"question": f"{number}?", "answer": line["answer"]}) + "\n")
    held_out = [word for word in more if word not in ("--validation-fraction", "0.2")]
    yield (
        "windows",
        ["unfreeze", "sft", *on_dense, "--data", str(many), "--validation-fraction", "0.01", *held_out],
    )


def make_models(folder: Path) -> tuple[Path, Path]:
    """A dense checkpoint and a folder with nothing but config and tokenizer, made once for both checkouts."""
    import torch

    from unfreeze import models
    from unfreeze.checkpoint import save_checkpoint
    from unfreeze.models.publish import published

    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1536,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    names = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
    extra = {name: ROOT / TINY_K2 / name for name in names}
    model = models.build(models.shape(config), dtype=torch.bfloat16, device="cpu")
    models.initialize(model, seed=0)
    save_checkpoint(folder / "dense", config, published(model, config), extra=extra)
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(
        json.dumps({**json.loads((ROOT / TINY_K2 / "config.json").read_text()), "quantization_config": None})
    )
    for name, path in extra.items():
        (bare / name).write_bytes(path.read_bytes())
    return folder / "dense", bare


def run(checkout: Path, command: list[str], out: Path) -> dict[str, object]:
    """The compared numbers of one job."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    environment["UNFREEZE_KERNELS"] = "records"  # the choice of kernels must not depend on today's times
    done = subprocess.run(
        [sys.executable, "-m", *command, "--out", str(out)],
        cwd=out.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    compared: dict[str, object] = {
        kind: [{name: event.get(name) for name in names} for event in events if event["kind"] == kind]
        for kind, names in COMPARED.items()
    }
    written = [path for path in sorted(out.rglob("*.safetensors")) if "state" not in path.parts]
    return compared | {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in written
    }


def difference(name: str, before: object, now: object) -> str:
    """The first difference between two values, in words."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        place = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        return difference(f"{name}[{place}]", before[place], now[place])
    if isinstance(before, dict) and isinstance(now, dict):
        key = next((key for key in [*before, *now] if before.get(key) != now.get(key)), None)
        return difference(f"{name}.{key}", before.get(key), now.get(key)) if key is not None else name
    return f"{name}: {str(before)[:80]} became {str(now)[:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, metavar="GIT_REF")
    parser.add_argument("--only", default="", help="jobs whose name holds this text")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        other = folder / "before"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(other), options.against],
            cwd=ROOT,
            check=True,
        )
        try:
            dense, bare = make_models(folder)
            for name, command in [*jobs(dense, bare), *more_jobs(dense, folder)]:
                if options.only not in name:
                    continue
                results = []
                for side, checkout in (("a", other), ("b", ROOT)):
                    (folder / f"{name} {side}").mkdir()
                    results.append(run(checkout, command, folder / f"{name} {side}" / "run"))
                before, now = results
                same = before == now and "failed" not in before
                failures += not same
                print(
                    f"{'equal ' if same else 'DIFFER'}  {name}"
                    + ("" if same else f": {difference('', before, now)}"),
                    flush=True,
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=False)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
