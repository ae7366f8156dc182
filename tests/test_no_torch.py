"""Claims about what answers at once: help, inspect, and the refusal of a path, flag, field or config import
neither torch nor numba (2 s of CPU against 0.3)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
import contextlib, io, json, os, sys
from unfreeze import cli
lines, heavy = map(json.loads, sys.argv[1:])
answers = []
for line in lines:
    before, out = set(sys.modules), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = cli.main(line)
        except SystemExit as end:  # --help
            code = end.code
    loaded = sorted(set(heavy) & (set(sys.modules) - before))
    answers.append([code, loaded, out.getvalue(), os.path.exists("runs")])
print("answers", json.dumps(answers))
"""


class Answer(NamedTuple):
    """loaded: what of HEAVY was first imported by that command line; made: whether it made a folder runs."""

    code: int
    loaded: list[str]
    said: str
    made: bool


def run(*lines: str, cwd: Path) -> list[Answer]:
    """The answers of command lines that one process is given, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([line.split() for line in lines]), json.dumps(sorted(HEAVY))],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Answer(*each) for each in json.loads(done.stdout.splitlines()[-1].removeprefix("answers "))]


def other_model(folder: Path, **fields: object) -> str:
    """tiny-k2 with other fields in its config.json."""
    shutil.copytree(TINY_K2, folder)
    config = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")
    return str(folder)


DATA = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


HELP = [f"{'dev ' * (command in DEV)}{command} --help" for command in COMMANDS]
REFUSED = {
    "inspect /nowhere": "/nowhere does not exist",
    "sft --model /nowhere --data data.jsonl": "/nowhere does not exist",
    "sft --model /nowhere --data x.jsonl": "x.jsonl",
    "sft --model other --data data.jsonl": "model_type 'gpt_x' is not built",
    "sft --model packed --data data.jsonl": 'quant_method "made-up"',
    "sft --model /nowhere --data data.jsonl --lora.rank -1": "rank",
    "sft --model /nowhere --data data.jsonl --learning-rat 1": "learning-rate",
    "distill --model tiny --teacher /nowhere --data data.jsonl": "/nowhere does not exist",
    "prefer --model /nowhere --data data.jsonl": "/nowhere does not exist",
    "prefer --model tiny --data data.jsonl --preference.gamma 1": "preference.gamma needs loss = simpo",
    "pretrain --model /nowhere --data data.jsonl": "/nowhere does not exist",
    "pretrain --model packed --data data.jsonl": 'quant_method "made-up"',
    "chat /nowhere": "/nowhere does not exist",
    "chat other": "model_type 'gpt_x' is not built",
    "generate packed --prompt a": 'quant_method "made-up"',
    "generate /nowhere --prompt a": "/nowhere does not exist",
    "data show data.jsonl --model /nowhere": "/nowhere",
    "report /nowhere": "/nowhere",
    "compare /nowhere /nowhere": "/nowhere",
    "export /nowhere": "/nowhere",
    "synth plan /nowhere --recipe r.toml": "there is no recipe r.toml",
    "synth run /nowhere": "/nowhere is no plan",
    "dev bisect /nowhere --against hf": "/nowhere does not exist",
    "dev bench nothing": "nothing",
    "nothing": "nothing",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Answer]:
    """Of all command lines, given to one process: what the first imports is seen, whoever needs it later."""
    here = tmp_path_factory.mktemp("here")
    (here / "data.jsonl").write_text(DATA, encoding="utf-8")
    shutil.copytree(TINY_K2, here / "tiny")
    other_model(here / "other", model_type="gpt_x")
    other_model(here / "packed", quantization_config={"quant_method": "made-up", "bits": 4})
    lines = [*HELP, "inspect tiny", *REFUSED]
    return dict(zip(lines, run(*lines, cwd=here), strict=True))


@pytest.mark.parametrize("line", [*HELP, "inspect tiny"])
def test_what_answers(line, answers):
    code, loaded, said, _ = answers[line]
    assert code == 0, said
    assert not loaded, LATER.format(" and ".join(loaded))


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal(line, answers):
    code, loaded, said, made = answers[line]
    assert REFUSED[line] in said
    assert code == 2
    assert not loaded, LATER.format(" and ".join(loaded))
    assert not made


def test_what_does_need_torch_is_seen(tmp_path):
    """At its own line, behind others."""
    needs = f"generate {TINY_K2} --prompt a --max-new-tokens 1"
    before, there, after = run("sft --help", needs, "chat /nowhere", cwd=tmp_path)
    assert there.code == 0 and "torch" in there.loaded and not before.loaded and not after.loaded
