"""bench equal: its comparison sees what differs; nightly the whole on tiny-k2, with 1 + 2 + 1 + 2 processes."""

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.cases import equal
from benchmarks.cases.equal import ARMS, Arm
from benchmarks.harness.rows import read
from benchmarks.harness.targets import TARGETS, unequal
from unfreeze.core.command import Common


@pytest.mark.nightly
def test_two_processes_are_compared_with_one_and_have_a_row_each(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    config = equal.Config(append=str(path), steps=2, threads=1)
    arms = ARMS[0], Arm("experts over 2, from disk", 2, 2, "disk"), *ARMS[-2:]
    equal.measure(config, Common(), arms, length=24)
    one, two, whole, divided = read(path)
    assert [row.side for row in (one, two, whole, divided)] == [arm.name for arm in arms]
    for first in (one, whole):
        assert set(first.results["correctness"].values()) == {0.0}
    for found in (two.results["correctness"], divided.results["correctness"]):
        assert 0 < found["gradients"] < 1e-5 and found["losses"] < 1e-5
    assert two.results["correctness"]["expert op"] == 0.0 and "expert op" not in found
    said = capsys.readouterr().out
    assert "all within 1e-05" in said and "expert op" in said
    (target,) = [target for target in TARGETS if target.benchmark == "equal"]
    assert target.verdict(unequal([one, two, whole, divided])) == "met"


@pytest.mark.parametrize("train", ["adapters", "all"])
def test_control_arm_a_gradient_that_is_off_and_rows_of_another_process_show(train, tmp_path):
    """Of split experts and of weights that are divided: twice the gradient, or half of it, and other rows."""
    name = "model.layers.1.mlp.experts.adapter.down_A" if train == "adapters" else "lm_head.weight"
    whole = torch.arange(24.0).view(4, 6) + 1
    common = {"losses": torch.tensor([1.0, 2.0])}
    common |= {"op": torch.tensor(0.0)} if train == "adapters" else {}
    save_file({f"gradient.{name}": whole, **common}, tmp_path / "one-0")
    arm = Arm("two", 2, 2 if train == "adapters" else 1, train=train)
    for rank, rows in enumerate(([0, 2], [2, 4])):
        own = {f"rows.{name}": torch.tensor(rows), f"gradient.{name}": whole[slice(*rows)].clone(), **common}
        save_file(own, tmp_path / f"two-{rank}")
    assert set(equal.worst(tmp_path, arm, Arm("one", 1)).values()) == {0.0}
    for wrong in (2 * whole[2:], whole[2:] / 2, whole[1:3]):
        own = {f"rows.{name}": torch.tensor([2, 4]), f"gradient.{name}": wrong.clone(), **common}
        save_file(own, tmp_path / "two-1")
        found = equal.worst(tmp_path, arm, Arm("one", 1))
        assert (found["expert gradients"] > 0.1) == (train == "adapters") == ("expert op" in found)
        assert found["gradients"] > 0.1 and found["losses"] == 0.0


@pytest.mark.nightly
def test_a_process_that_fails_is_named_by_its_arm(tmp_path):
    config = equal.Config(model=str(tmp_path), steps=1)
    with pytest.raises(equal.UserError, match="1 process: a process ended with"):
        equal.measure(config, Common(quiet=True), ARMS[:1])
