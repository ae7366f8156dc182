"""The event schema, docs/reference/events.md and every call of emit say the same; what breaks the schema is named."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest

from unfreeze.core import schema
from unfreeze.core.balance import balance, dead, load_entropy, max_violation
from unfreeze.core.conform import damage, violations
from unfreeze.core.schema import FURTHER, KINDS

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {"kind": "train", "step": 1, "time": 1.5, "loss": 2.5, "grad_norm": 1, "tokens": 8}
spec = importlib.util.spec_from_file_location("events_page", ROOT / "benchmarks" / "events_page.py")
assert spec and spec.loader
events_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(events_page)


def words_of(event: dict) -> list[str]:
    return [fault.words for fault in violations(event)]


def test_the_page_is_made_of_the_schema():
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    assert events_page.inserted(page) == page, (
        "run: python benchmarks/events_page.py --write docs/reference/events.md"
    )
    row = "| `grad_norm` | `float or null` | L2 norm before clipping | of all trained parameters |"
    absent = "| `tokens` | `int` | tokens | of the step; may be absent |"
    assert row in page and absent in page
    by_hand = 2  # "Every event", and what trackers show
    assert page.count("\n## ") == len(KINDS) + len(events_page.INSIDE) + by_hand


def without_union(classes: Mapping[str, object]) -> list[str]:
    """Classes with a kind that the union Event lacks."""
    kinds = [each for each in classes.values() if "kind" in getattr(each, "__required_keys__", ())]
    return sorted(each.__name__ for each in kinds if each not in get_args(schema.Event))


def test_every_class_with_a_kind_is_in_the_union():
    missing = without_union(vars(schema))
    assert not missing, f"add {missing} to the union Event at the end of the classes in core/schema.py"


def test_control_arm_a_class_outside_the_union_and_an_object_without_a_heading_are_seen(monkeypatch):
    class LostEvent(schema.CommonFields):
        kind: Literal["lost"]

    assert without_union({"LostEvent": LostEvent}) == ["LostEvent"]
    rest = {heading: inside for heading, inside in events_page.INSIDE.items() if heading != "Group"}
    monkeypatch.setattr(events_page, "INSIDE", rest)
    with pytest.raises(KeyError, match="GroupReceipt stands inside an event: give it a heading in INSIDE"):
        events_page.page()


def test_control_arm_a_field_that_the_page_forgets_is_seen():
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    forgotten = page.replace("`peak_bytes`", "`peek_bytes`")
    assert forgotten != page and events_page.inserted(forgotten) == page


def emits(tree: ast.AST) -> list[tuple[int, str, list[str]]]:
    """(line, kind, keywords) of every call `….emit("kind", …, field=…)`; ** arguments are judged where a run
    is made (job/test_events.py)."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit"
    ]
    return [
        (call.lineno, call.args[0].value, [word.arg for word in call.keywords if word.arg])
        for call in calls
        if call.args and isinstance(call.args[0], ast.Constant)
    ]


def unknown(source: str) -> list[str]:
    """Kinds and fields that a source emits and the schema doesn't have."""
    bad = []
    for line, kind, words in emits(ast.parse(source)) if ".emit(" in source else ():
        fields = KINDS[kind].__annotations__ if kind in KINDS else {}
        strange = [] if kind in FURTHER else [word for word in words if word not in fields]
        bad += [f"line {line}: {kind} {', '.join(strange)}".rstrip()] if strange or kind not in KINDS else []
    return bad


def test_every_emit_in_the_source_is_in_the_schema():
    bad = {
        path.name: lines
        for path in (ROOT / "src").rglob("*.py")
        if (lines := unknown(path.read_text(encoding="utf-8")))
    }
    assert not bad, (
        f"{bad}: add the field to its class in core/schema.py (a new kind: a class, and its name in the union"
        " Event below), then run: python benchmarks/events_page.py --write docs/reference/events.md"
    )


def test_control_arm_an_unknown_kind_or_field_is_seen():
    assert unknown('log.emit("save", 1, path="x")') == []
    assert unknown('log.emit("save", 1, folder="x")') == ["line 1: save folder"] and unknown(
        'log.emit("saved", 1)'
    ) == ["line 1: saved"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kind": "trian"}, "Input tag 'trian' found using 'kind' does not match any of the expected tags"),
        ({"loss": "2.5"}, "train.loss is '2.5': Input should be a valid number"),
        ({"loss": float("nan")}, "train.loss is nan: Input should be a finite number, at most 1e300"),
        ({"loss": 1e301}, "train.loss is 1e+301: Input should be a finite number, at most 1e300"),
        ({"loss": np.float32(1)}, "train.loss is np.float32(1.0): Input should be a valid number"),
        ({"loss": True}, "train.loss is True: Input should be a valid number"),
        ({"step": True}, "train.step is True: Input should be a valid integer"),
        ({"tokens": 8.0}, "train.tokens is 8.0: Input should be a valid integer"),
        ({"tokens": 2**63}, "train.tokens is 9223372036854775808: Input should be less than"),
        ({"tokens": None}, "train.tokens is None: Input should be a valid integer"),
        ({"applied": 1}, "train.applied is 1: Input should be a valid boolean"),
        ({"error": 3}, "train.error is 3: Input should be an instance of str"),
        ({"correct": "much"}, "train.correct is 'much': Input should be a valid number"),
        ({"expert_load": {"1": [4, 0.5]}}, "train.expert_load.1.1 is 0.5: Input should be a valid integer"),
        (
            {"expert_load": {"1": [4, -1]}},
            "train.expert_load.1.1 is -1: Input should be greater than or equal",
        ),
        ({"expert_load": {"1": []}}, "train.expert_load.1 is []: List should have at least 1 item"),
        ({"expert_load": [4]}, "train.expert_load is [4]: Input should be a valid dictionary"),
        (
            {"expert_balance": {"1": {"max_violation": 0.1, "entropy": 1.0}}},
            "train.expert_balance.1.dead is missing",
        ),
    ],
)
def test_what_breaks_the_schema_is_named(change: dict, words: str):
    assert words_of(TRAIN) == [] and words_of(TRAIN | {"correct": None, "expert_load": {"1": [4]}}) == []
    assert any(words in fault for fault in words_of(TRAIN | change))


def test_missing_and_further_fields_are_named():
    assert words_of({"kind": "save", "step": 1, "time": 0}) == ["save.path is missing"]
    assert words_of({"kind": "save", "step": 1, "time": 0, "path": "p", "size": 3}) == [
        "save.size is 3: Extra inputs are not permitted"
    ]


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "train", "step": 1},
        {"kind": "save", "step": 1, "size": 3},
        {"kind": "guard", "step": 1, "limit": "x"},
        TRAIN | {"best": True, "rows": ["a"]},
        {"kind": "sample", "step": 0, "text": "half a pair: \ud800"},
    ],
)
def test_what_another_version_may_have_written_is_no_damage(event: dict):
    assert damage(event) == []
    assert [fault.words for fault in damage(TRAIN | {"step": "1"})] == [
        "train.step is '1': Input should be a valid integer"
    ]


def test_an_object_inside_an_event_that_lacks_a_field_is_damage():
    event = {"kind": "receipt", "step": 1, "exceptions": [{"group": "mlp", "why": "not moved"}]}
    assert [fault.words for fault in damage(event)] == ["receipt.exceptions.0.sites is missing"]


def test_balance_of_known_loads():
    """Even, one-sided and empty layers, worked out by hand; p = 1/2, 1/4, 1/4, 0 has entropy 1.5 ln 2, and ln
    4 = 2 ln 2."""
    assert balance([5, 5, 5, 5]) == {"max_violation": 0.0, "entropy": pytest.approx(1.0), "dead": 0}
    assert balance([8, 0, 0, 0]) == {"max_violation": 3.0, "entropy": 0.0, "dead": 3}
    assert balance([4, 2, 2, 0]) == {"max_violation": 1.0, "entropy": pytest.approx(0.75), "dead": 1}
    assert (max_violation([0, 0]), load_entropy([0, 0]), dead([0, 0]), load_entropy([7])) == (
        None,
        None,
        2,
        1.0,
    )
