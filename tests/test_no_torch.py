"""Claims about what answers at once: help, inspect, and the refusal of a path, flag, field or config import
neither torch nor numba (2 s of CPU against 0.3)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unfreeze.cli import COMMANDS, DEV
from unfreeze.commands.demo import TINY_K2

HEAVY = {"torch", "numba", "transformers"}
LATER = (
    "{} is imported before it is needed. Import it inside the function that computes, or under TYPE_CHECKING, in"
    " the file of the command, recipe, loss, family or format; `python -X importtime -m unfreeze COMMAND --help`"
    " shows who does"
)
RUN = """
import sys, json
from unfreeze import cli
try:
    code = cli.main(json.loads(sys.argv[1]))
except SystemExit as end:  # --help
    code = end.code
print("loaded", json.dumps([code, sorted(set(json.loads(sys.argv[2])) & set(sys.modules))]))
"""


def run(*arguments: str, cwd: Path) -> tuple[int, list[str], str]:
    """(exit code, what of HEAVY is loaded afterwards, what it said on stderr) of one command line."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(arguments), json.dumps(sorted(HEAVY))],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    code, loaded = json.loads(done.stdout.splitlines()[-1].removeprefix("loaded "))
    return code, loaded, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, tmp_path):
    before = ("dev",) if command in DEV else ()
    code, loaded, said = run(*before, command, "--help", cwd=tmp_path)
    assert code == 0, said
    assert not loaded, LATER.format(" and ".join(loaded))


def test_inspect(tmp_path):
    code, loaded, said = run("inspect", str(TINY_K2), cwd=tmp_path)
    assert code == 0, said
    assert not loaded, LATER.format(" and ".join(loaded))


def other_model(folder: Path, **fields: object) -> str:
    """tiny-k2 with other fields in its config.json."""
    shutil.copytree(TINY_K2, folder)
    config = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")
    return str(folder)


DATA = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize(
    "line, says",
    [
        ("inspect /nowhere", "/nowhere does not exist"),
        ("sft --model /nowhere --data data.jsonl", "/nowhere does not exist"),
        ("sft --model /nowhere --data x.jsonl", "x.jsonl"),
        ("sft --model other --data data.jsonl", "model_type 'gpt_x' is not built"),
        ("sft --model packed --data data.jsonl", 'quant_method "made-up"'),
        ("sft --model /nowhere --data data.jsonl --lora.rank -1", "rank"),
        ("sft --model /nowhere --data data.jsonl --learning-rat 1", "learning-rate"),
        ("distill --model tiny --teacher /nowhere --data data.jsonl", "/nowhere does not exist"),
        ("prefer --model /nowhere --data data.jsonl", "/nowhere does not exist"),
        ("prefer --model tiny --data data.jsonl --gamma 1", "gamma is of loss = simpo alone"),
        ("pretrain --model /nowhere --data data.jsonl", "/nowhere does not exist"),
        ("pretrain --model packed --data data.jsonl", 'quant_method "made-up"'),
        ("chat /nowhere", "/nowhere does not exist"),
        ("chat other", "model_type 'gpt_x' is not built"),
        ("generate packed --prompt a", 'quant_method "made-up"'),
        ("generate /nowhere --prompt a", "/nowhere does not exist"),
        ("data show data.jsonl --model /nowhere", "/nowhere"),
        ("report /nowhere", "/nowhere"),
        ("compare /nowhere /nowhere", "/nowhere"),
        ("export /nowhere", "/nowhere"),
        ("dev bisect /nowhere --against hf", "/nowhere does not exist"),
        ("dev bench nothing", "nothing"),
        ("nothing", "nothing"),
    ],
)
def test_a_refusal(line, says, tmp_path):
    (tmp_path / "data.jsonl").write_text(DATA, encoding="utf-8")
    line = line.replace("tiny", str(TINY_K2))
    if "other" in line:
        other_model(tmp_path / "other", model_type="gpt_x")
    if "packed" in line:
        other_model(tmp_path / "packed", quantization_config={"quant_method": "made-up", "bits": 4})
    code, loaded, said = run(*line.split(), cwd=tmp_path)
    assert says in said
    assert code == 2
    assert not loaded, LATER.format(" and ".join(loaded))
    assert not (tmp_path / "runs").exists()


def test_what_does_need_torch_is_seen(tmp_path):
    code, loaded, _ = run("generate", str(TINY_K2), "--prompt", "a", "--max-new-tokens", "1", cwd=tmp_path)
    assert code == 0 and "torch" in loaded
