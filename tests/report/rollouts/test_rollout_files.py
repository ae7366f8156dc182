"""Files of rollouts: what is written comes back, within a limit of bytes, and damage costs only what it hit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.rollouts.fake import fake_step
from unfreeze.report.rollouts import Answer, Rollouts, StepFile, files
from unfreeze.report.rollouts.numbers import numbers_of

ODD = (
    "a\x00b",
    "\x1b[31mred\x1b[0m",
    "\ud800 alone",
    "\u2028 \u2029 \x85",
    "</script><script>x()</script>",
    "",
)


def row(**fields: Any) -> Answer:
    return {"step": 1, "group": 0, "answer": 0, "reward": 0.5, **fields}


def read(path: Path) -> tuple[list[Answer], StepFile]:
    file = StepFile(path)
    return list(file), file


def test_any_text_comes_back_as_it_was(tmp_path: Path):
    long = "x" * 2**20
    rows = [row(answer=i, prompt=text, text=text, pieces=[text], message=text) for i, text in enumerate(ODD)]
    rows += [row(answer=9, text=long, parts={"a\x00\ud800": 0.25}, turns=[["user", long], ["tool", "\x1b["]])]
    writer = Rollouts(tmp_path)
    assert writer.write(12, rows) is None
    path = tmp_path / "rollouts" / "step-000012.jsonl.gz"
    assert files(writer.folder) == {12: path}
    answers, file = read(path)
    assert answers == rows and (file.fault, file.dropped) == ("", 0)
    # a line per answer, plain ASCII: any JSON reader takes it
    lines = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()
    assert len(lines) == len(rows) and all(json.loads(line)["group"] == 0 for line in lines)


def test_equal_rows_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []
    for name, day in (("a", 1.79e9), ("b", 1.80e9)):
        monkeypatch.setattr("time.time", lambda day=day: day)
        Rollouts(tmp_path / name).write(1, fake_step(1))
        written.append((tmp_path / name / "rollouts" / "step-000001.jsonl.gz").read_bytes())
    assert written[0] == written[1]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path):
    writer = Rollouts(tmp_path)
    writer.write(1, [row(text="first")])
    with pytest.raises(TypeError):
        writer.write(1, [row(text="second"), row(text=object())])
    assert [path.name for path in writer.folder.iterdir()] == ["step-000001.jsonl.gz"]
    assert read(next(writer.folder.iterdir()))[0][0]["text"] == "first"


def test_what_is_not_finite_is_null_and_log_p_has_five_digits(tmp_path: Path):
    writer = Rollouts(tmp_path)
    odd = [float("nan"), float("-inf"), -0.123456789]
    writer.write(
        1, [row(reward=float("nan"), logprobs=odd, advantage=odd, parts={"a": float("inf"), "b": 1 / 3})]
    )
    (answer,), _ = read(files(writer.folder)[1])
    assert answer["reward"] is None and answer["parts"] == {"a": None, "b": 1 / 3}
    assert answer["logprobs"] == answer["advantage"] == [None, None, -0.12346]


def test_above_the_limit_groups_keep_their_ends_and_it_is_said_once(tmp_path: Path):
    step = fake_step(1)
    writer = Rollouts(tmp_path, limit=1000)
    assert writer.write(1, step) is None  # the folder was empty
    size = writer.num_bytes
    assert size == pytest.approx(files(writer.folder)[1].stat().st_size * 7 / 3) and size > 1000
    writer.limit = size - 1
    said = writer.write(2, fake_step(2))
    assert said and "from step 2 on it keeps the worst and best answer of a group" in said
    assert writer.write(3, fake_step(3)) is None
    for number in (2, 3):
        whole = fake_step(number)
        answers, file = read(files(writer.folder)[number])
        assert file.dropped == len(whole) - len(answers) and len(answers) == 16
        assert file.whole == json.loads(json.dumps(numbers_of(number, whole)))
        for group in range(8):
            rewards = [each["reward"] for each in whole if each["group"] == group]
            kept = [each["reward"] for each in answers if each["group"] == group]
            key = lambda reward: -1.0 if reward is None else reward  # noqa: E731
            assert (min(kept, key=key), max(kept, key=key)) == (min(rewards, key=key), max(rewards, key=key))


def test_a_step_that_is_written_again_does_not_count_against_itself(tmp_path: Path):
    writer = Rollouts(tmp_path)
    writer.write(1, fake_step(1))
    writer.limit = writer.num_bytes / 2
    assert writer.write(1, fake_step(1)) is None
    assert len(read(files(writer.folder)[1])[0]) == 64


def test_above_twice_the_limit_only_numbers_are_kept(tmp_path: Path):
    writer = Rollouts(tmp_path, limit=1)
    writer.write(1, fake_step(1))
    said = writer.write(2, fake_step(2))
    assert said and "only their numbers" in said
    answers, file = read(files(writer.folder)[2])
    assert answers == [] and file.dropped == 64 and file.whole["answers"] == 64
    assert writer.write(3, fake_step(3)) is None


def test_a_resumed_run_counts_what_is_there_and_drops_later_steps(tmp_path: Path):
    writer = Rollouts(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, fake_step(step))
    again = Rollouts(tmp_path)
    assert again.num_bytes == writer.num_bytes > 0
    again.drop_after(1)
    assert list(files(again.folder)) == [1]
    again.write(1, fake_step(1))  # replaced, not counted twice
    assert again.num_bytes == Rollouts(tmp_path).num_bytes < writer.num_bytes


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_cut_file_is_one_line_and_its_beginning_is_read(tmp_path: Path, share: float):
    writer = Rollouts(tmp_path)
    writer.write(7, fake_step(7))
    path = files(writer.folder)[7]
    packed = path.read_bytes()
    path.write_bytes(packed[: int(share * len(packed))])
    answers, file = read(path)
    assert 0 < len(answers) < 64 and json.loads(json.dumps(answers)) == answers
    assert file.fault == f"step-000007.jsonl.gz is cut or damaged: {len(answers)} answers could be read"


DAMAGE = (
    b"{",
    b"[]",
    b'{"step": 1}',
    b'{"step": 1, "group": 0, "answer": 0, "logprobs": [NaN]}',  # a browser would refuse it
    b'{"step": 1, "group": 0, "answer": 0, "reward": "high"}',
    b'{"step": 1, "group": 0, "answer": 0, "pieces": [1]}',
    b'{"step": 1, "group": 0, "answer": 0, "text": {"a": 1}}',
    b'{"step": true, "group": 0, "answer": 0}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"dropped": "many", "numbers": {}}',
)


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path):
    path = tmp_path / "step-000001.jsonl.gz"
    good = json.dumps(row()).encode()
    path.write_bytes(gzip.compress(b"\n".join([good, *DAMAGE, good]) + b"\n"))
    answers, file = read(path)
    assert answers == [row(), row()]
    assert file.fault == f"step-000001.jsonl.gz has {len(DAMAGE)} damaged lines: 2 answers could be read"


@pytest.mark.parametrize("content", [b"", b"not gzip", b"\x1f\x8b\x08\x00" + b"\xff" * 40])
def test_a_file_that_is_no_gzip_is_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "step-000001.jsonl.gz"
    path.write_bytes(content)
    answers, file = read(path)
    assert answers == [] and (
        not content or file.fault.endswith("is cut or damaged: 0 answers could be read")
    )


def test_only_files_of_steps_count(tmp_path: Path):
    for name in (
        "step-x.jsonl.gz",
        "step-000002.jsonl.gz.7.tmp",
        f"step-{'9' * 99}.jsonl.gz",
        "step-10.jsonl.gz",
    ):
        (tmp_path / name).write_bytes(b"")
    assert list(files(tmp_path)) == [10] and files(tmp_path / "none") == {}
