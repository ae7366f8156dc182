"""One scripted session of the command line: each command with its output and its exit code, as text.

A group is a function `(session) -> None`; what it records is tests/said/<group>.txt.
What differs between machines is replaced by a sign (MACHINE), so that the text is the same on every one.
"""

from __future__ import annotations

import io
import re
import shlex
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from unfreeze import __version__, cli
from unfreeze.config.recipes import CONFIGS

MACHINE = [
    (re.compile(r"^(load|encode)  .*\n", re.M), ""),  # progress of what took long
    (re.compile(r"(unpacked\)|/s); (?:preparing step|\d+ kernels?) .+"), r"\1; preparing"),
    (re.compile(r"\bplan for .+?: .+ usable now"), "plan for MACHINE"),
    (re.compile(r"(machine     unfreeze VERSION).+"), r"\1, MACHINE"),
    (re.compile(r"(bfloat16|float32) here: .+(it|units)$", re.MULTILINE), "DTYPE here: WHY"),
    (re.compile(r"(computed in) .+ \(.+\)$", re.MULTILINE), r"\1 DTYPE (WHY)"),
    (re.compile(r"(dtype: float32) \(.+\)$", re.MULTILINE), r"\1"),
    (re.compile(r"(kernels on) cpu-.+"), r"\1 MACHINE"),
    (re.compile(r"  Kernels .+?\n(?=  \w)", re.DOTALL), ""),  # only where some are not measured
    (re.compile(r"\Aunfreeze VERSION.*\ntorch VERSION.*"), "unfreeze VERSION\ntorch VERSION, MACHINE"),
    (re.compile(r"(?<=\() *\d[\d,.]* (?:[KMGT]i?)?B\b"), "# bytes"),
    (re.compile(r" *\b\d[\d,.]* (?:[KMGT]i?)?B(/s)?\b"), r" # bytes\1"),
    (re.compile(r"# bytes to # bytes"), "# bytes"),
    (
        re.compile(r"^ +attention workspace # bytes\n", re.M),
        "",
    ),  # of a kernel that not every class of CPU takes
    # which parts a time has, and where it wraps; the guards, of which one watches the planned peak
    (re.compile(r"^(  Time) .+(?:\n {10}.+)*", re.M), r"\1 #"),
    (re.compile(r"^  Guards .+(?:\n {10}.+)*\n", re.M), ""),
    (re.compile(r" *\b\d[\d,.]* tokens/s"), " # tokens/s"),
    (re.compile(r"(Tokens per second) +[\d,.]+"), r"\1 #"),
    (re.compile(r"\b\d[\d.]* (?:ms|s|min|h)\b(?: \d+ (?:s|min)\b)?"), "# s"),
    (re.compile(r"(largest relative difference) [\d.e-]+"), r"\1 #"),
]
"""What a machine's speed, memory or versions make other -> the sign in its place."""
FIGURES = (re.compile(r" *(?<![\w.-])\d+\.\d+(?:e-?\d+)?\b(?! [%K])"), " #")
"""Numbers with a decimal point, of what was computed: their last digits differ between CPUs."""


class Session:
    """Runs commands in this process, in the current folder, and keeps what they said."""

    def __init__(self, here: Path):
        self.here = here
        self.sections: list[str] = []
        self.codes: list[int] = []

    def __call__(self, command: str, *, machine: bool = False, computed: bool = False) -> None:
        """`unfreeze COMMAND`; machine: its figures are this machine's. computed: also its numbers."""
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = cli.main(shlex.split(command))
            except SystemExit as ended:  # --help
                code = int(ended.code or 0)
        text = out.getvalue().replace(f"{self.here}/", "").replace(str(self.here), ".")
        for name, version in {"unfreeze": __version__, "torch": torch.__version__}.items():
            text = text.replace(f"{name} {version}", f"{name} VERSION")
        for pattern, sign in [*(MACHINE if machine else []), *([FIGURES] if computed else [])]:
            text = pattern.sub(sign, text)
        lines = [line.rstrip() for line in text.splitlines()]
        self.codes.append(code)
        self.sections.append("\n".join([f"$ unfreeze {command}".rstrip(), *lines, f"[{code}]", ""]))

    @property
    def text(self) -> str:
        return "\n".join(self.sections)


def help(say: Session) -> None:
    """What the program can do: the first page, and each command's flags."""
    say("--version", machine=True)
    for command in ("", "--help", "dev", "dev --help"):
        say(command)
    for name in cli.COMMANDS:
        say(f"{'dev ' * (name in cli.DEV)}{name} --help")
    for name in (*CONFIGS, "plan"):
        say(f"{name} --help-all")


def words(say: Session) -> None:
    """Wrong commands, flags, values and TOML files: refused before anything is opened."""
    for command in ("inspekt", "train", "quantize", "gguf", "eval", "grpo", "trian", "xyzzy", "dev sft"):
        say(command)
    for command in ("sft", "distill --model m", "prefer", "pretrain", "chat", "compare", "export", "merge"):
        say(command)
    run = "sft --model m --data d.jsonl"
    for flags in (
        "--lr 1e-4 --lora_r 8",
        "--batch-size 4",
        "--gradient_accumulation_steps 4",
        "--lora_alpha 32 --target_modules q_proj v_proj --warmup_ratio=0.1 --weight_decay 0.1 --save_steps 9",
        "--gradient_checkpointing --lr_scheduler_type cosine --use_dora true --bf16 true",
        "--warmup_steps 1",
        "--optim adamw_8bit",
        "--lora_alpha 32 --sweep rank=4,8",
        "--load_in_4bit",
        "--qlora",
        "--deepspeed x",
        "--rope-scaling 2",
        "--new-tokens 3",
        "--learning-rat 1",
        "--steps three",
        "--steps 0",
        "--steps",
        "--steps 3 4",
        "--optimizer.warmup 2",
        "--optimizer.clip nan",
        "--learning-rate -1",
        "--optimizer.schedule cosin",
        "--watch.track wandb foo",
        "--dtype float16",
        "--train all --lora.rank 8",
        "--data.weights 1 two",
        "--data e.jsonl",
        "--columns questoin=task",
        "--place.experts moon",
        "--optimizer.moments int4",
        "--sweep learning_rate",
    ):
        say(f"{run} {flags}")
    for file in ("none.toml", "run.yaml", "broken.toml", "key.toml", "type.toml", "table.toml", "twice.toml"):
        say(f"sft {file}")
    for command in ("dpo", "kto", "tarin", "finetune", "stf"):
        say(f"{command} --model m --data d.jsonl --epochs 2")
    say("sft org/name --data d.jsonl")
    say("sft chat.jsonl --epochs 2")
    say("sft 'my rows.csv' --model m")
    say("sft -m m -d d.jsonl")
    say("generate -m m -p Hello")
    say("chat m --prompt 'Hello there'")
    say("prefer --model m --data d.jsonl --loss ppo")
    say("distill --model m --data d.jsonl --teacher t --temperature 0")
    say("export run --for ollama")
    say("merge run --to gguf")
    say("dev bench speed")
    say("dev kernels look")


def models(say: Session) -> None:
    """Folders that are no model, or not one that is built."""
    for folder in (
        "none",
        "tiny-k3",
        "chat.jsonl",
        "empty",
        "pickled",
        "no-weights",
        "broken-json",
        "no-type",
        "unknown-type",
        "quantized",
        "cut",
        "pickle.bin",
    ):
        say(f"inspect {folder}")
    for folder in ("pickled", "no-weights", "no-type", "unknown-type", "no-field", "not-built", "rope"):
        say(f"sft --model {folder} --data chat.jsonl --out new --steps 1")
    for folder in ("too-large", "quantized", "other-words", "no-tokenizer"):
        say(f"sft --model {folder} --data chat.jsonl --out new --steps 1")
    for folder in ("no-tokenizer", "no-template", "wrong-template"):
        say(f"data show chat.jsonl --model {folder}")
    run = "sft --model tiny-k2 --data chat.jsonl --out new --steps 1 --dtype float32"
    for flags in (
        "--device cuda",
        "--device gpu",
        "--device mps",
        "--lora.targets q_prj",
        "--lora.targets norms",
        "--adapter tiny-k2",
        "--place.split 3",
        "--watch.prompts",
        "--validation none.jsonl",
        "--validation-fraction 1.5",
    ):
        say(f"{run} {flags}")
    for command in (
        "generate none --prompt Hello",
        "chat none",
        "generate tiny-k2",
        "export tiny-k2 --for vllm",
        "merge tiny-k2 --to int4",
        "report none",
    ):
        say(command)
    say("sft --model tinyk2 --data chat.jsonl --steps 1")
    say("compare run")
    say("plan tiny-k2 --hardware 8xH300")
    say("plan tiny-k2 --hardware 1xH200 --lora.rank 0")


def data(say: Session) -> None:
    """Files and rows that are not trained on."""
    for file in (
        "none.jsonl",
        "chta.jsonl",
        "rows.docx",
        "empty.jsonl",
        "binary.jsonl",
        "latin1.jsonl",
        "utf16.jsonl",
        "broken.jsonl",
        "number.jsonl",
        "unknown.jsonl",
        "role.jsonl",
        "user.jsonl",
        "null.jsonl",
        "image.jsonl",
        "pairs.jsonl",
        "labels.jsonl",
        "message.jsonl",
        "sharegpt.jsonl",
        "odd.csv",
        "ragged.csv",
        "unclosed.json",
        "folder",
        "*.tsv",
    ):
        say(f"data show {shlex.quote(file)} --model tiny-k2")
    say("data show odd.csv --model tiny-k2 --columns prompt=tsk completion=reply")
    run = "--model tiny-k2 --out new --steps 1 --dtype float32"
    for file in ("chat.jsonl", "same.jsonl", "other-prompt.jsonl", "no-prompt.jsonl", "labels.jsonl"):
        say(f"prefer --data {file} {run}")
    say(f"sft --data pairs.jsonl {run}")
    say(f"sft --data labels.jsonl {run}")
    say(f"sft --data chat.jsonl --data.weights 1 2 {run}")
    say(f"sft --data chat.jsonl --validation-fraction 0.01 {run}")
    say(f"sft --data chat.jsonl --validation chat.jsonl {run}")
    say(f"sft --data chat.jsonl --tokens-per-step 8 {run}")
    say(f"sft --data chat.jsonl --tokens-per-step 22 {run}")
    say(f"prefer --data long.jsonl --tokens-per-step 50 {run}")
    say(f"sft --data short.jsonl --sequence-length 8 {run}")
    say(f"sft --data chat.jsonl --sequence-length 1 {run}")
    say(f"distill --data chat.jsonl --teacher none {run}")
    say(f"distill --data chat.jsonl --teacher other-words {run}")


def look(say: Session) -> None:
    """What the commands that look say of a model, its data, a machine."""
    say("inspect tiny-k2")
    say("data show chat.jsonl --model tiny-k2")
    say("init tiny-k2 chat.jsonl")
    say("init tiny-k2 chat.jsonl --file new.toml", machine=True)
    say("plan tiny-k2 --hardware 1xH200")
    say("plan qwen.json --hardware 8xH200 --train all --sequence-length 1024 --tokens-per-step 8192")
    say("plan qwen.json --hardware 1xH100")
    say("plan qwen.json --hardware 1xRTX4090 --tokens-per-step 4096")
    say("plan tiny-k2 --hardware cpu:8GB --tokens-per-step 512", machine=True, computed=True)
    say("doctor tiny-k2 --data chat.jsonl --config run.toml", machine=True, computed=True)
    say("doctor cut --data broken.jsonl --config run.toml", machine=True, computed=True)


def runs(say: Session) -> None:
    """A run from its first line to its last, what follows it, and how others begin."""
    run = "--model tiny-k2 --dtype float32 --tokens-per-step 128 --device cpu"
    of = {"machine": True, "computed": True}
    say(f"sft {run} --data chat.jsonl --out run --steps 2 --watch.samples 1", **of)
    say(f"sft {run} --data chat.jsonl --out run --steps 2 --watch.samples 1", **of)
    say(f"sft {run} --data chat.jsonl --out run --steps 2 --watch.samples 1 --learning-rate 1e-3", **of)
    say(f"sft {run} --data chat.jsonl --out run.toml --steps 2", **of)
    say("resume run")
    say("report run", **of)
    say("chat run --device cuda", **of)
    say("export run --for peft", **of)
    say("export run --for peft", **of)
    say("merge run --to bf16 --out chat.jsonl", **of)


GROUPS: dict[str, Callable[[Session], None]] = {
    group.__name__: group for group in (help, words, models, data, look, runs)
}


def recorded(group: str, here: Path) -> str:
    """The text of a group, with the session's files in the current folder."""
    session = Session(here)
    GROUPS[group](session)
    return session.text
