"""bench recompute end to end on a tiny shape."""

import pytest

from benchmarks.cases import recompute
from benchmarks.harness.rows import read
from unfreeze.core.command import Common

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 256,
}


def test_auto_is_measured_beside_a_choice_by_name_and_both_agree_with_float64(tmp_path):
    path = tmp_path / "rows.jsonl"
    config = recompute.Config(append=str(path), steps=1, threads=1)
    recompute.measure(config, Common(quiet=True), TINY, checked={}, documents=2, length=32)
    auto, selective, *peers = read(path)
    assert (auto.side, selective.side) == ("auto", "selective")
    # of a model this small everything fits
    assert auto.settings["recompute"] == "nothing" and selective.settings["recompute"] == "selective"
    assert selective.results["first_side_speed"] > 0
    assert [row.side for row in peers] == ["peft", "peft-checkpointing"]
    # nothing recomputed is float64's own question; a peer's check is the model as it is
    for row in peers:
        assert row.results["correctness"] and max(row.results["correctness"].values()) < 2e-3
        assert row.results["trained_parameters"] == auto.results["trained_parameters"]
    for row in (auto, selective):
        errors = row.results["correctness"]
        assert errors["loss, against float64"] < 2e-3 and errors["gradient norm, against float64"] < 0.03


@pytest.mark.parametrize(("gib", "wanted"), [(64, "nothing"), (1, "layers")])
def test_what_auto_is_follows_the_free_memory(gib, wanted, monkeypatch):
    """At 1,024 tokens a step the true shape needs more than 1 GiB for its weights alone."""
    from unfreeze.parallel import machine

    free = machine.Hardware("cpu", "small", 2, gib * 2**30, gib * 2**30)
    monkeypatch.setattr(machine, "hardware", lambda place: free)
    assert recompute.chosen(recompute.qwen3(), "cpu", 2, 512, "bfloat16") == wanted
