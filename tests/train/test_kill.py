"""kill -9 at any moment, inside a save too, and the same command again: bit for bit the uninterrupted run
(docs/why/trust.md R1)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from unfreeze.commands.demo import TINY_K2

ROWS = [
    {"question": f"What is the symbol of gold, {word}?", "answer": f"Au, the symbol of gold is, {word}. Hmm."}
    for word in "abcdefgh"
]


def killing(forkserver: Any, *arguments: object) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("killing.py")
    process = forkserver.run([script, *arguments], env=environment, timeout=600)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def events(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """All events of a kind without what is of the clock and the machine."""
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in event.items() if k not in ("time", "seconds", "peak_bytes")}
        for event in found
        if event["kind"] == kind
    ]


@pytest.mark.parametrize(
    ("kills", "steps"), [(6, 16), pytest.param(20, 80, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_unfreeze_sft_killed_often_gives_the_losses_of_the_uninterrupted_run(
    kills: int, steps: int, tmp_path: Path, forkserver: Any
):
    """Half the kills before a random file operation of a save, half at a random time (loading, training,
    validating or saving), all in one folder."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    result = killing(
        forkserver,
        "often",
        tmp_path,
        kills,
        "sft",
        "--model",
        TINY_K2,
        "--data",
        tmp_path / "rows.jsonl",
        "--steps",
        steps,
        "--tokens-per-step",
        64,
        "--lora.rank",
        1,
        "--lora.targets",
        "attention",
        "experts",
        "--watch.samples",
        0,
        "--save-every",
        1,
        "--threads",
        1,
        "--dtype",
        "float32",
        "--place.recompute",
        "nothing",
        "--validation-fraction",
        0.4,
        "--watch.validate-every",
        steps // 8,
    )
    assert [kill["code"] for kill in result["seen"]] == [-9] * kills and result["last"] == 0
    # some kills did fall into a save
    assert any(name.endswith(".tmp") for kill in result["seen"] for name in kill["saves"])
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert events(killed, "eval") == events(straight, "eval") and len(events(killed, "eval")) == 9
    assert events(killed) == events(straight) and [event["step"] for event in events(killed)] == list(
        range(1, steps + 1)
    )
    for file in (
        "adapter/adapter_model.safetensors",
        f"state/step-{steps:06}/tensors.safetensors",
        "receipt.json",
    ):
        assert (killed / file).read_bytes() == (straight / file).read_bytes(), file
    kept = [sorted(path.name for path in (run / "state").iterdir()) for run in (killed, straight)]
    assert kept[0] == kept[1] and {f"step-{steps - 1:06}", f"step-{steps:06}"} <= set(kept[0])
    assert not [path for path in killed.rglob("*") if "unfinished" in path.name or path.suffix == ".tmp"]


def test_a_kill_before_each_file_operation_of_a_save_loses_one_step_at_most(tmp_path: Path, forkserver: Any):
    found = killing(forkserver, "moments", tmp_path, "none")["none"]
    assert {"open", "write", "fsync", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} <= set(
        found["operations"]
    )
    assert len(found["left"]) >= 15  # kills
    # the save before, and from the rename on the new one
    assert set(found["left"]) == {2, 3} and sorted(found["left"]) == found["left"]
    assert all(losses == found["straight"] for losses in found["losses"]) and len(found["straight"]) == 4


def test_control_arms_a_save_in_place_is_read_half_and_room_made_first_loses_all(
    tmp_path: Path, forkserver: Any
):
    moments = killing(forkserver, "moments", tmp_path, "in place", "room first")
    assert "unreadable" in moments["in place"]["left"]
    assert 0 in moments["room first"]["left"]
