"""bench profile on a tiny shape: times add up, GEMMs have FLOPs and bytes, numba loops have names."""

import pytest

from benchmarks.cases import profile
from benchmarks.harness.rows import Stamp
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError


@pytest.mark.parametrize("name", ["moe", "decode"])
def test_a_job_is_profiled_op_by_op(name, tmp_path, tiny_sizes):
    out = tmp_path / f"{name}.md"
    found = profile.measure(profile.Config(name=name, out=str(out)), Common(quiet=True), tiny_sizes)
    assert 0 < sum(one["seconds"] for one in found["ops"]) <= found["seconds"] * 1.02
    gemms = [one for one in found["ops"] if one["op"] in ("aten::mm", "aten::addmm")]
    assert gemms and all(one["flop"] > 0 and one["moved"] > 0 for one in gemms)
    assert all(one["moved"] == 0 for one in found["ops"] if one["op"].startswith("numba"))
    if name == "moe":
        assert {"numba swiglu", "numba gather"} <= {one["op"] for one in found["ops"]}
    text = out.read_text()
    assert (
        f"# Profile of `{name}`" in text and f"| {found['ops'][0]['op']} |" in text and profile.REST in text
    )


def test_the_page_adds_up_to_the_step():
    spent = [profile.Spent(f"op {i}", 2, 0.01, 0.0) for i in range(40)] + [
        profile.Spent("aten::mm", 1, 0.5, 1e9, 3e9)
    ]
    found = profile.Profile(sorted(spent, key=lambda s: -s.seconds), 1.0, 0.9, 4e9, 24e9, 0.1, 1234)
    text = profile.page("moe", "a step", Stamp.now("profile", "x"), found)
    assert "| aten::mm | 1 | 500.0 | 50.0% | 1.0 | 2 | 50% | 3,000 | 6.0 | 25% |" in text
    # neither FLOP nor bytes are known: blank, not 0
    assert "| op 7 | 2 | 10.0 | 1.0% |  |  |  |  |  |  |" in text
    assert (
        "| 11 smaller ops | 22 | 110.0 | 11.0% |" in text and f"| {profile.REST} |  | 100.0 | 10.0% |" in text
    )
    assert (
        "0.90 s without, of that 0.10 s in the kernel with 1,234 page faults" in text
        and "a copy in memory 24.0 GB/s" in text
    )


def test_growth_stands_beside_itself_per_token(tmp_path, tiny_sizes):
    out = tmp_path / "growth.md"
    found = profile.measure(
        profile.Config(name="growth", tokens=(1024, 512), out=str(out)), Common(quiet=True), tiny_sizes
    )
    assert list(found["ops"]) == list(found["seconds"]) == [512, 1024]
    work = {tokens: sum(one["flop"] for one in ops) for tokens, ops in found["ops"].items()}
    assert work[1024] == pytest.approx(2 * work[512], rel=0.05)  # the same work per token
    assert "us per token at 512 | us per token at 1,024 | more |" in out.read_text()


def test_the_page_of_growth_shows_which_op_grows():
    small = profile.Profile(
        [profile.Spent("aten::mm", 1, 0.06, 2e9, 1e9), profile.Spent("fixed", 1, 0.03, 0.0)],
        0.1,
        0.1,
        4e10,
        2e10,
    )
    large = profile.Profile(
        [profile.Spent("aten::mm", 1, 0.9, 2e10, 9e9), profile.Spent("fixed", 1, 0.03, 0.0)],
        1.0,
        1.0,
        4e10,
        2e10,
        0.2,
        30_000,
    )
    text = profile.growth_page(Stamp.now("profile", "x"), {1000: small, 10_000: large})
    assert "| aten::mm | 60.00 | 90.00 | +30.00 | 1 | 1 | 22 | 56% | 10.0 | 50% |" in text
    assert "| fixed | 30.00 | 3.00 | -27.00 | 1 | 1 |  |  |  |  |" in text
    assert (
        f"| {profile.REST} | 10.00 | 7.00 | -3.00 |" in text
        and "| whole step | 100.00 | 100.00 | +0.00 |" in text
    )
    assert "20.0 in the kernel with 3.00 page faults per token" in text


def test_sizes_that_are_no_multiple_of_a_document_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="1000 is not a multiple of 512"):
        profile.measure(
            profile.Config(name="growth", tokens=(1000, 512), out=str(tmp_path / "x.md")), Common(quiet=True)
        )


def test_loops_have_names_only_inside(monkeypatch):
    from unfreeze.kernels.expert_mlp.panels_cpu import Panels
    from unfreeze.kernels.loops.numba_options import Kernel

    def loops():
        return Kernel.__call__, Panels.forward_group, Panels.backward_group

    before = loops()
    with pytest.raises(RuntimeError), profile.named_loops():
        assert all(now is not then for now, then in zip(loops(), before, strict=True))
        raise RuntimeError
    assert loops() == before
