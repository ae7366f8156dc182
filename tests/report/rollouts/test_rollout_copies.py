"""Copies for the page: each file is read once, its bytes go over as they are, and prompts find their earlier step."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from tests.report.rollouts.fake import fake_run, fake_step
from unfreeze.report.rollouts import Answer, Rollouts, StepFile, files
from unfreeze.report.rollouts.copies import copy_of, copy_steps
from unfreeze.report.rollouts.numbers import numbers_of

CALL = re.compile(r'unfreezeRollouts\((\d+), "([A-Za-z0-9+/=]*)", (\{.*\})\);')


def call(path: Path) -> tuple[int, bytes, dict[str, Any]]:
    """(step, gzip, about) of a copy; nothing else is in it but a line of comment."""
    head, code, end = path.read_text(encoding="ascii").split("\n")
    parts = CALL.fullmatch(code)
    assert head.startswith("// {") and parts and end == ""
    return int(parts[1]), base64.b64decode(parts[2]), json.loads(parts[3])


def test_a_copy_has_the_bytes_of_its_file_and_the_numbers_of_its_answers(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=3)
    steps = copy_steps(run)
    assert [step.numbers["step"] for step in steps] == [1, 2, 3]
    for number, source in files(run / "rollouts").items():
        step, packed, about = call(copy_of(source))
        assert step == number and packed == source.read_bytes()
        assert about["dropped"] == 0 and about["fault"] == ""
        assert steps[number - 1].numbers == numbers_of(number, StepFile(source))
    assert not list((run / "rollouts").glob("*.tmp"))


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch):
    run = fake_run(tmp_path / "run", steps=3)
    first, reads = copy_steps(run), list[str]()
    iterate = StepFile.__iter__
    monkeypatch.setattr(StepFile, "__iter__", lambda file: (reads.append(file.path.name), iterate(file))[1])
    assert copy_steps(run) == first and reads == []
    Rollouts(run).write(2, fake_step(2, skill=1.0))
    again = copy_steps(run)
    assert reads == ["step-000002.jsonl.gz"]
    assert again[1] != first[1] and [again[0], again[2]] == [first[0], first[2]]


def test_a_copy_without_its_file_goes_and_a_damaged_one_is_made_anew(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=3)
    first = copy_steps(run)
    Rollouts(run).drop_after(2)
    broken = run / "rollouts" / "step-000001.js"
    whole = broken.read_bytes()
    for damage in (b"", b"// {\n", b"// []\n", whole.replace(b'"tokens": ', b'"tokens": "x", "": ')):
        broken.write_bytes(damage)
        assert copy_steps(run) == first[:2] and broken.read_bytes() == whole
    assert not (run / "rollouts" / "step-000003.js").exists()


def test_a_group_knows_the_last_step_before_with_its_prompt(tmp_path: Path):
    prompts = {1: ["a", "b"], 2: ["b", "c"], 3: ["d", "a"], 5: ["b\ud800", "b"]}
    rows: dict[int, list[Answer]] = {
        step: [{"step": step, "group": i, "answer": 0, "prompt": prompt} for i, prompt in enumerate(names)]
        for step, names in prompts.items()
    }
    run = fake_run(tmp_path / "run", rows=rows)
    copy_steps(run)
    before = {step: call(copy_of(source))[2]["before"] for step, source in files(run / "rollouts").items()}
    assert before == {1: {}, 2: {"0": 1}, 3: {"1": 1}, 5: {"1": 2}}


def test_of_a_damaged_file_the_copy_has_what_can_be_read(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=2)
    source = files(run / "rollouts")[1]
    source.write_bytes(source.read_bytes()[:-900])
    steps = copy_steps(run)
    _, packed, about = call(copy_of(source))
    lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert lines == list(StepFile(source)) and 0 < len(lines) < 64
    assert (
        about["fault"]
        == steps[0].fault
        == f"{source.name} is cut or damaged: {len(lines)} answers could be read"
    )


def test_of_a_step_that_kept_its_ends_the_numbers_are_of_all(tmp_path: Path):
    run = fake_run(tmp_path / "run", steps=1)
    writer = Rollouts(run, limit=1)
    writer.limit = writer.num_bytes / 1.5
    writer.write(2, fake_step(2))
    step = copy_steps(run)[1]
    assert step.dropped == 48 and step.numbers == numbers_of(2, fake_step(2))
