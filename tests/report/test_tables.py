"""The receipt and the plan as tables say the numbers they were given, and name the group that stood still."""

from __future__ import annotations

import io

from rich.console import Console

from unfreeze.report.tables import (
    align,
    count_trained,
    left_out,
    plan_table,
    receipt_rows,
    receipt_table,
    receipt_text,
    standing_still,
)

GROUPS = {
    "attention": {
        "parameters": 412_672,
        "trained": True,
        "grad_norm": 0.41234,
        "moved": 3.12e-7,
        "output_change": 0.00211,
        "sites": 16,
        "sites_reached": 15,
        "sites_moved": 14,
    },
    "[router]": {"parameters": 8_192, "trained": False},
}


def test_receipt_rows():
    assert receipt_rows(GROUPS) == [
        ("attention", "412,672", "yes", "14 of 15", "0.412", "3.12e-07", "0.00211"),
        ("[router]", "8,192", "no", "–", "–", "–", "–"),
    ]
    assert count_trained(GROUPS) == 412_672
    assert count_trained({"a": {"parameters": 10, "trained": 4}}) == 4


def test_standing_still_names_only_trained_groups_that_did_not_move():
    assert standing_still(GROUPS) == []
    # control arm: the fault planted
    assert standing_still(
        GROUPS | {"experts": {"parameters": 5, "trained": True, "moved": 0.0}, "head": {"trained": True}}
    ) == ["experts", "head"]


def test_a_group_that_no_gradient_was_due_to_does_not_stand_still():
    assert standing_still({"experts": {"trained": 5, "moved": 0.0, "sites_reached": 0}}) == []


def test_left_out_names_the_faults_first_ones_in_full():
    entry = {
        "group": "experts",
        "sites": "model.layers.1.mlp.experts.0-31.down_proj",
        "count": 32,
        "why": "no gradient",
    }
    one = {"group": "attention", "sites": "model.layers.1.self_attn.q_b_proj", "count": 1, "why": "not moved"}
    assert left_out([entry, one, {**one, "why": "gradient below 1e-8, no movement"}]) == [
        "no gradient: model.layers.1.mlp.experts.0-31.down_proj (32 matrices)",
        "not moved: model.layers.1.self_attn.q_b_proj",
    ]
    assert left_out([one] * 10)[-1] == "and 2 more entries: receipt.json" and left_out([]) == []


def test_receipt_text_is_aligned_and_the_rich_table_has_the_same_cells():
    lines = receipt_text(GROUPS).splitlines()
    ends = {line.index(cell) + len(cell) for line, cell in zip(lines[1:], ("412,672", "8,192"), strict=True)}
    assert lines[0].startswith("group") and len(ends) == 1
    out = io.StringIO()
    Console(file=out, width=120).print(receipt_table(GROUPS))
    for row in receipt_rows(GROUPS):
        assert all(cell in out.getvalue() for cell in row)  # "[router]" too: group names are no markup


def test_plan_lines():
    assert plan_table({"lines": ["a", "b"], "terms": {"x": 1}}) == ["a", "b"]
    assert plan_table({"terms": {"base": 1024, "adapter": 512}}) == [
        "base     1.0 KiB",
        "adapter    512 B",
        "total    1.5 KiB",
    ]
    assert plan_table(None) == plan_table({}) == plan_table({"terms": {}}) == []


def test_align():
    assert align([("a", "1"), ("bbb", "22")]) == "a     1\nbbb  22"


def test_the_table_shows_the_whole_names_of_the_groups_in_80_columns():
    row = {
        "parameters": 1_179_648,
        "trained": 442_000,
        "sites": 144,
        "sites_reached": 144,
        "sites_moved": 144,
        "grad_norm": 2.53,
        "moved": 0.0886,
        "output_change": 0.219,
    }
    out = io.StringIO()
    Console(file=out, width=80).print(receipt_table({"shared_experts": row, "attention": row}))
    assert (
        "shared_experts" in out.getvalue()
        and "144 of 144" in out.getvalue()
        and "\u2026" not in out.getvalue()
    )
