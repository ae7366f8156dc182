"""bench dense end to end on a tiny shape."""

import pytest

from benchmarks.cases import dense
from benchmarks.harness.rows import read
from unfreeze.core.command import Common

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "rows.jsonl"
    dense.measure(
        dense.Config(append=str(path), steps=2, threads=1),
        Common(quiet=True),
        TINY,
        checked={},
        documents=2,
        length=32,
    )
    return {row.side: row for row in read(path)}


@pytest.mark.nightly
def test_every_side_is_measured_or_says_why_not(rows):
    assert list(rows) == ["unfreeze", "transformers", "transformers-liger"]
    assert (
        "need a GPU" in rows["transformers-liger"].not_run
        and rows["unfreeze"].settings["tokens_per_step"] == 64
    )


@pytest.mark.nightly
def test_the_state_is_what_each_side_really_holds(rows):
    """unfreeze: bf16 weight 2, gradient 2 (one micro-batch), float32 master and moments 12; transformers: all
    of these in bf16."""
    ours, theirs = rows["unfreeze"].results, rows["transformers"].results
    parameters = ours["trained_parameters"]
    assert parameters == theirs["trained_parameters"]
    assert (
        ours["state_bytes"]["weights"] == pytest.approx(2 * parameters, rel=0.01)
        and ours["state_bytes"]["gradients"] == 2 * parameters
    )
    assert ours["state_bytes"]["optimizer"] == pytest.approx(12 * parameters, rel=0.01)
    assert theirs["state_bytes"]["gradients"] == 2 * parameters and theirs["state_bytes"][
        "optimizer"
    ] == pytest.approx(4 * parameters, rel=0.01)
    assert theirs["first_side_above_state"] == pytest.approx(
        ours["above_state_bytes"] / theirs["above_state_bytes"]
    )


@pytest.mark.nightly
def test_both_sides_agree_with_float64(rows):
    """The same weights and tokens: a mean loss in bf16 agrees to 1e-3, the norm of all gradients to 3 %."""
    for name in ("unfreeze", "transformers"):
        errors = rows[name].results["correctness"]
        assert errors["loss, against float64"] < 2e-3 and errors["gradient norm, against float64"] < 0.03, (
            name,
            errors,
        )
