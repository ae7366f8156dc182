"""bench profile on a tiny shape: times add up, GEMMs have FLOPs, numba loops have names."""

import pytest

from unfreeze.core.command import Common
from unfreeze.recipes.bench import profile
from unfreeze.recipes.bench.rows import Stamp


@pytest.mark.parametrize("name", ["moe", "decode"])
def test_a_job_is_profiled_op_by_op(name, tmp_path, tiny_sizes):
    out = tmp_path / f"{name}.md"
    found = profile.measure(profile.Config(name=name, out=str(out)), Common(quiet=True), tiny_sizes)
    assert 0 < sum(one["seconds"] for one in found["ops"]) <= found["seconds"] * 1.02
    gemms = [one for one in found["ops"] if one["op"] in ("aten::mm", "aten::addmm")]
    assert gemms and all(one["flop"] > 0 for one in gemms)
    if name == "moe":
        assert {"numba swiglu", "numba gather"} <= {one["op"] for one in found["ops"]}
    text = out.read_text()
    assert f"# Profile of `{name}`" in text and "| aten::mm |" in text and profile.REST in text


def test_the_page_adds_up_to_the_step():
    spent = [profile.Spent(f"op {i}", 2, 0.01, 0.0) for i in range(40)] + [profile.Spent("aten::mm", 1, 0.5, 1e9)]
    text = profile.page("moe", "a step", Stamp.now("profile", "x"), profile.Profile(sorted(spent, key=lambda s: -s.seconds), 1.0, 0.9, 4e9))
    assert "| aten::mm | 1 | 500.0 | 50.0% | 1.0 | 2 | 50% |" in text
    assert "| 11 smaller ops | 22 | 110.0 | 11.0% |" in text and f"| {profile.REST} |  | 100.0 | 10.0% |" in text


def test_loops_have_names_only_inside(monkeypatch):
    from unfreeze.kernels.numba_options import Kernel

    before = Kernel.__call__
    with pytest.raises(RuntimeError), profile.named_loops():
        assert Kernel.__call__ is not before
        raise RuntimeError
    assert Kernel.__call__ is before
