"""bench formats on a tiny shape: every format steps and agrees with float64, and its experts agree with plain
torch."""

import pytest

from benchmarks.cases import formats
from benchmarks.harness.rows import read
from unfreeze.core.command import Common

pytestmark = pytest.mark.nightly
LAYER = {"experts": 4, "hidden": 128, "width": 128, "tokens": 24, "per_token": 2}


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tiny_sizes):
    path = tmp_path_factory.mktemp("formats") / "rows.jsonl"
    config = formats.Config(append=str(path), steps=2, warmup=1, threads=1, repeats=1)
    sizes = tiny_sizes | {"hidden_size": 128, "moe_intermediate_size": 128}
    formats.measure(config, Common(quiet=True), sizes, checked={}, layer=LAYER, documents=2, length=32)
    return {row.side: row for row in read(path)}


def test_every_format_has_its_rows(rows):
    assert list(rows) == [*formats.CONFIGS, *(f"{name} experts" for name in formats.codecs())]


@pytest.mark.parametrize("name", formats.CONFIGS)
def test_a_step_agrees_with_float64_of_the_same_checkpoint(rows, name):
    """bf16 has 8 bits: a loss is an average over tokens and agrees to 2e-3, a gradient norm to 3 %."""
    found = rows[name].results
    assert found["correctness"]["loss, fresh adapters, against float64"] < 2e-3
    assert found["correctness"]["gradient norm, against float64"] < 0.03
    assert found["of_int4"] > 0 and found["resident_last"] > 10**7


@pytest.mark.parametrize("name", formats.codecs())
def test_experts_agree_with_plain_torch(rows, name):
    found = rows[f"{name} experts"].results
    assert max(found["correctness"].values()) < 0.02  # roundings of bf16
    assert found["bytes_per_weight"] < 1.6 and found["ms"] > 0


def test_control_arm_another_formats_checkpoint_is_seen(rows):
    """The float64 comparison is with the format's own checkpoint: INT4's loss is another."""
    losses = [rows[name].results["loss_first"] for name in formats.CONFIGS]
    assert len(set(losses)) == len(losses)


def test_the_table_has_a_line_per_format(rows):
    experts = {name: rows[f"{name} experts"].results for name in formats.codecs()}
    assert len(formats.table(experts).splitlines()) == 1 + len(experts)
