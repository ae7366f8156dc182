"""The event schema, docs/events.md and every call of emit say the same; what breaks the schema is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from unfreeze.core.balance import balance, dead, load_entropy, max_violation
from unfreeze.core.schema import BALANCE, COMMON, SCHEMA, conforms, faults

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {"kind": "train", "step": 1, "time": 1.5, "loss": 2.5, "grad_norm": 1, "tokens": 8}


def documented(page: str) -> dict[str, dict[str, tuple[str, str, bool]]]:
    """Heading -> field -> (type, unit, optional) of every table with a type column in the page."""
    found: dict[str, dict[str, tuple[str, str, bool]]] = {}
    for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| ([^|]+) \| ([^|]*) \|$", body, re.MULTILINE)
        if rows:
            found[heading] = {name: (kind, unit, "may be absent" in words) for name, kind, unit, words in rows}
    return found


def test_the_page_names_every_field_with_its_type_and_unit_and_no_other():
    tables = {"Every event": COMMON, **{name: kind.fields for name, kind in SCHEMA.items()}, "expert_balance": BALANCE}
    page = documented((ROOT / "docs" / "events.md").read_text(encoding="utf-8"))
    assert page == {title: {name: tuple(field) for name, field in fields.items()} for title, fields in tables.items()}


def test_control_arm_a_field_that_the_page_forgets_is_seen():
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    assert "peak_bytes" in documented(page)["train"] and "peak_bytes" not in documented(page.replace("`peak_bytes`", "`peek_bytes`"))["train"]


def emits(tree: ast.AST) -> list[tuple[int, str, list[str]]]:
    """(line, kind, keywords) of every call `….emit("kind", …, field=…)`; ** arguments are judged where a run is made (recipes/test_events.py)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit"]
    return [(call.lineno, call.args[0].value, [word.arg for word in call.keywords if word.arg])
            for call in calls if call.args and isinstance(call.args[0], ast.Constant)]  # fmt: skip


def unknown(source: str) -> list[str]:
    """Kinds and fields that a source emits and the schema doesn't have."""
    bad = []
    for line, kind, words in emits(ast.parse(source)):
        fields = {**COMMON, **SCHEMA[kind].fields} if kind in SCHEMA else {}
        strange = [word for word in words if word not in fields] if kind not in SCHEMA or not SCHEMA[kind].further else []
        bad += [f"line {line}: {kind} {', '.join(strange)}".rstrip()] if strange or kind not in SCHEMA else []
    return bad


def test_every_emit_in_the_source_is_in_the_schema():
    bad = {path.name: lines for path in (ROOT / "src").rglob("*.py") if (lines := unknown(path.read_text(encoding="utf-8")))}
    assert not bad, f"{bad}: add the kind or field to core/schema.py and docs/events.md"


def test_control_arm_an_unknown_kind_or_field_is_seen():
    assert unknown('log.emit("save", 1, path="x")') == []
    assert unknown('log.emit("save", 1, folder="x")') == ["line 1: save folder"] and unknown('log.emit("saved", 1)') == ["line 1: saved"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kind": "trian"}, "kind 'trian' is not in the schema"),
        ({"loss": "2.5"}, "train.loss is not of type float?: '2.5'"),
        ({"loss": float("nan")}, "train.loss is not of type float?: nan"),
        ({"step": True}, "train.step is not of type int: True"),
        ({"tokens": 8.0}, "train.tokens is not of type int: 8.0"),
        ({"correct": "much"}, "train.correct is not of type float?: 'much'"),
        ({"expert_load": {"1": [4, 0.5]}}, "train.expert_load is not of type {[int]}: {'1': [4, 0.5]}"),
        ({"expert_balance": {"1": {"max_violation": 0.1, "entropy": 1.0}}}, "expert_balance.1.dead is missing"),
    ],
)
def test_what_breaks_the_schema_is_named(change: dict, words: str):
    assert faults(TRAIN) == [] and faults(TRAIN | {"correct": None, "expert_load": {"1": [4]}}) == []
    assert any(words in fault for fault in faults(TRAIN | change))


def test_missing_and_further_fields_are_named():
    assert faults({"kind": "save", "step": 1, "time": 0}) == ["save.path is missing"]
    assert faults({"kind": "save", "step": 1, "time": 0, "path": "p", "size": 3}) == ["save.size is not in the schema"]


def test_types():
    assert conforms({"a": [1]}, "{[int]}") and conforms(None, "text?") and conforms(1, "float") and conforms({}, "object")
    assert not conforms(None, "text") and not conforms([1, "2"], "[int]") and not conforms(True, "float") and not conforms([], "{int}")


def test_balance_of_known_loads():
    """Even, one-sided and empty layers, worked out by hand; p = 1/2, 1/4, 1/4, 0 has entropy 1.5 ln 2, and ln 4 = 2 ln 2."""
    assert balance([5, 5, 5, 5]) == {"max_violation": 0.0, "entropy": pytest.approx(1.0), "dead": 0}
    assert balance([8, 0, 0, 0]) == {"max_violation": 3.0, "entropy": 0.0, "dead": 3}
    assert balance([4, 2, 2, 0]) == {"max_violation": 1.0, "entropy": pytest.approx(0.75), "dead": 1}
    assert (max_violation([0, 0]), load_entropy([0, 0]), dead([0, 0]), load_entropy([7])) == (None, None, 2, 1.0)
