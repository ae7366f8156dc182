"""What is planned for 42 pairs of a model and a machine: where what lies and its bytes, as tests/plans.json has them.

A change of bytes is a commit of its own, which says why. To make the file anew:
    pytest tests/plans --update-plans
"""

import json
from pathlib import Path

import planned_rows

from unfreeze.core.cpu import cpu_class

RECORDED = Path(__file__).parents[1] / "plans.json"
RECORDED_ON = "cpu-avx512-bf16"
"""The class of CPU whose scratch memory the rows of CPUs have; other loops take other scratch."""


def comparable(recorded: list[dict]) -> list[dict]:
    """The rows that this machine counts alike: all of GPUs; of CPUs where it is of that class."""
    here = cpu_class() == RECORDED_ON
    return [row for row in recorded if here or not row["asked"].split()[1].startswith("cpu")]


def differing(before: list[dict], now: list[dict]) -> list[str]:
    """One line for each row that differs: the first of its fields that does."""
    found = []
    recorded = {row["asked"]: row for row in before}
    for row in now:
        old = recorded.pop(row["asked"], {})
        if field := next((name for name in row if old.get(name) != row[name]), None):
            found.append(f"{row['asked']}: {field}: {old.get(field)} became {row[field]}")
    return [*found, *(f"{asked}: gone" for asked in recorded)]


def test_plans_are_those_recorded(request, tmp_path):
    now = planned_rows.rows(tmp_path)
    if request.config.getoption("--update-plans"):
        RECORDED.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert not differing(comparable(recorded), comparable(now))


def test_control_arm_a_byte_more_and_another_place_are_seen():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded) >= 40 and not differing(recorded, recorded)
    (first, *others), place = recorded, recorded[0]["place"]
    more = {**first, "adapter_parameters": first["adapter_parameters"] + 1}
    elsewhere = {**first, "place": {**place, "rest": "host"}}
    for changed in (more, elsewhere):
        (line,) = differing(recorded, [changed, *others])
        assert line.startswith(first["asked"])
    assert differing(recorded, others) == [f"{first['asked']}: gone"]
