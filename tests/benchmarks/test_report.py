"""docs/measured/performance.md is what the generator makes of the committed rows; and the generator's arithmetic, on
planted rows."""

import pytest

from benchmarks import BENCHMARKS
from benchmarks.harness import report
from benchmarks.harness.rows import ROOT, Stamp, append, machine
from benchmarks.harness.targets import TARGETS, Target, field
from unfreeze import cli
from unfreeze.core.errors import ConfigError


def test_the_committed_page_is_what_the_committed_rows_make():
    """After measuring: unfreeze dev bench report, and commit both."""
    committed = ROOT / "docs" / "measured" / "performance.md"
    assert committed.read_text(encoding="utf-8") == report.page(
        report.runs_of(ROOT / "benchmarks" / "results"), report.profiles_beside(committed)
    )


@pytest.fixture
def plant(tmp_path):
    """Append rows of a run: (side, settings, results)…"""

    def plant(benchmark, when, *sides, device="cpu-avx512-bf16"):
        place = machine("cpu", 2).model_copy(update={"device": device})
        stamp = Stamp(
            benchmark=benchmark,
            run=when,
            command=f"unfreeze dev bench {benchmark}",
            commit="abc",
            machine=place,
        )
        append(
            [stamp.row(side, settings, results) for side, settings, results in sides],
            tmp_path / f"{device}.jsonl",
        )
        return report.runs_of(tmp_path)

    return plant


def moe(speed, memory=0.1):
    ours = {"tokens_per_second": 100.0, "peak_bytes": 10, "correctness": {"loss": 1e-3}}
    theirs = {"tokens_per_second": 100 / speed, "peak_bytes": int(10 / memory), "correctness": {"loss": 2e-3}}
    return ("unfreeze", {}, ours), (
        "peft-experts",
        {},
        theirs | {"first_side_speed": speed, "first_side_memory": memory},
    )


def row_of(page, text):
    return next(line for line in page.splitlines() if line.startswith(f"| {text}"))


def test_a_target_is_met_missed_or_not_measured(plant):
    speed = next(target for target in TARGETS if target.benchmark == "moe" and target.limit == 6.0)
    page = report.page(plant("moe", "2026-11-01T00:00:00Z", *moe(6.5)))
    assert "| 6.50 x | met |" in row_of(page, speed.what) and page.count("not measured") >= len(TARGETS) - 2
    page = report.page(plant("moe", "2026-11-02T00:00:00Z", *moe(5.9)))
    assert "| 5.90 x | missed |" in row_of(page, speed.what) and "2026-11-02" in row_of(page, speed.what)
    page = report.page(plant("moe", "2026-11-03T00:00:00Z", moe(1.0)[0]))
    assert "| 5.90 x | missed |" in row_of(page, speed.what), (
        "a later run without that side does not hide the figure"
    )


def test_where_we_lose_names_missed_targets_and_every_peer_that_is_better(plant):
    assert report.losses(plant("moe", "2026-11-01T00:00:00Z", *moe(6.5))) == []
    runs = plant("moe", "2026-11-02T00:00:00Z", *moe(0.8, 1.25))
    found = report.losses(runs)
    assert any("0.80 x, the target is ≥ 6.00 x" in line for line in found)
    assert any("peft-experts is faster, 1.25 x our tokens/s" in line for line in found)
    assert any("takes less memory, 0.80 of our peak" in line for line in found)
    assert all(f"- {line}" in report.page(runs) for line in found)


def test_gpu_rows_count_for_gpu_targets_only(plant):
    item = {
        "ms": 8.0,
        "peak_bytes": 1,
        "correctness": {"y": 1e-3},
        "predicted": "6.4 ms",
        "refuted_beyond": 7.7,
        "verdict": "refuted",
    }
    grid = [
        {
            "routing": "balanced",
            "gb_per_second_between_gpus": bandwidth,
            "imbalance": 1.0,
            "overlap": 0.0,
            "seconds": 4.0,
            "derived_tokens_per_second": 10_000.0 + bandwidth,
        }
        for bandwidth in (400, 300)
    ]
    sides = ("gate/up forward", {"routing": "balanced"}, item), ("node", {}, {"grid": grid})
    runs = plant("layer", "2026-11-01T00:00:00Z", *sides, device="nvidia-h200")
    page = report.page(runs)
    assert any(
        "gate/up forward: refuted, 8.00 ms where 6.4 ms was predicted" in line for line in report.losses(runs)
    )
    assert "| 10,300 tokens/s | missed |" in row_of(
        page, "Kimi-K2 on eight GPUs"
    ) and "| 1 | missed |" in row_of(page, "Kimi-K2 layer")
    assert "## `layer` on nvidia-h200" in page and "| 400 |" in page
    runs = plant("moe", "2026-11-01T00:00:00Z", *moe(7), device="nvidia-h200")
    assert "| not measured |" in row_of(report.page(runs), TARGETS[0].what)


def test_a_cpu_without_bf16_units_has_targets_of_its_own(plant):
    runs = plant("moe", "2026-11-01T00:00:00Z", *moe(3.6), device="cpu-avx2")
    (own,) = (t for t in TARGETS if (t.kind, t.benchmark, t.limit) == ("cpu without bf16", "moe", 3.5))
    assert report.judge(own, runs)[0] == 3.6 and report.judge(TARGETS[0], runs) == (None, None)


def test_models_on_a_gpu_are_found_by_name(plant):
    def side(name, speed, experts):
        results = {
            "tokens_per_second": speed,
            "peak_bytes": 1,
            "correctness": {"loss": "falls"},
            "mfu": 0.27,
            "verdict": "missed",
        }
        return name, {"experts": experts}, results

    sides = (
        side("qwen3-30b-a3b-bf16", 1.0, "bf16"),
        side("qwen3-30b-a3b-int4", 18_000.0, "int4"),
        side("qwen2.5-7b", 19_000.0, ""),
    )
    page = report.page(plant("model", "2026-11-01T00:00:00Z", *sides, device="nvidia-h200"))
    assert "| 18,000 tokens/s | met |" in row_of(
        page, "Qwen3-30B-A3B"
    ) and "| 19,000 tokens/s | missed |" in row_of(page, "Qwen2.5-7B")
    assert (
        "| not measured |" in row_of(page, "Qwen3-0.6B")
        and "| side | measured | MFU | verdict | peak | error |" in page
    )


@pytest.mark.parametrize(
    "rule, value, verdict",
    [("least", 2.0, "met"), ("least", 1.99, "missed"), ("most", 2.0, "met"), ("most", 2.01, "missed")],
)
def test_a_limit_counts_as_met(rule, value, verdict):
    target = Target("x", "cpu", "moe", field("a", "b"), rule, 2.0)
    assert target.verdict(value) == verdict and target.verdict(None) == "not measured"


def test_a_field_is_found_by_side_and_settings_or_is_none(plant):
    rows = plant(
        "decode",
        "2026-11-01T00:00:00Z",
        ("a", {"batch": 1}, {"x": {"y": 1}}),
        ("a", {"batch": 16}, {"x": {"y": 2}}),
    )[0].rows
    assert (
        field("a", "x", "y", batch=16)(rows) == 2
        and field("a", "x", "z")(rows) is None
        and field("b", "x", "y")(rows) is None
    )


def decoded(model, side, batch, **results):
    settings = {"model": model, "batch": batch, "prompt": 64}
    whole = {"tokens_per_second": 9.0, "peak_bytes": 1, "correctness": {"other": 0.0, "nats": 0.0}}
    return side, settings, whole | results


def test_decoding_shows_the_limit_its_share_and_the_way_of_the_peer(plant):
    limit = {"limit": "bytes", "limit_seconds": 2.5e-3, "limit_share": 0.51, "step_seconds": 4.9e-3}
    limit |= {"read_rate": 46e9, "gemm_rate": 785e9}
    peer = {"way": "float32, eager", "tried": {"float32, eager": 40.04, "float32, compiled": "too long"}}
    runs = plant(
        "decode",
        "2026-11-01T00:00:00Z",
        decoded("moe", "unfreeze", 1, python_calls_per_token=900, **limit),
        decoded("moe", "transformers", 1, first_side_speed=2.6, first_side_memory=0.3, peer=peer, **limit),
        decoded("adapters", "unfreeze", 1, adapters_cost=1.2, **limit),
    )
    page = report.page(runs)
    line = row_of(page, "1 x 64 | unfreeze")
    assert "| 4.90 | 2.50 | bytes | 51% | 900 |" in line and "`adapters`:" in page
    assert (
        "transformers, 1 row x 64: float32, eager. Tried: float32, eager 40.0 ms; float32, compiled: too long."
        in page
    )
    assert "bytes at 46.0 GB/s, arithmetic at 785 GFLOP/s" in page
    assert "| 51% | met |" in row_of(page, "decoding, MoE, 1 row, of the machine's limit")
    assert "| 1.20 | missed |" in row_of(page, "decoding, time of a step with adapters")


def test_the_worst_of_all_cases_counts(plant):
    rows = [decoded("moe", "transformers", 1, first_side_speed=speed) for speed in (2.7, 2.4)]
    rows += [decoded("formats", kind, 1, of_int4=ratio) for kind, ratio in (("fp8", 1.4), ("awq", 1.6))]
    runs = plant("decode", "2026-11-01T00:00:00Z", *rows)
    values = {target.what: report.judge(target, runs)[0] for target in TARGETS if target.kind == "cpu"}
    assert values["decoding, MoE, 1 row, against transformers' generate: the less of two prompts"] == 2.4
    other = "decoding, experts in other formats, time per weight read over INT4's: the most of all"
    assert values[other] == 1.6
    assert values["decoding, MoE, 64 rows, of the machine's limit: the less of two prompts"] is None


def test_the_command_writes_the_page_and_says_what_is_missed(plant, tmp_path, unfreeze_json):
    plant("moe", "2026-11-01T00:00:00Z", *moe(5.0))
    found = unfreeze_json("bench", "report", "--results", tmp_path, "--out", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == report.page(report.runs_of(tmp_path))
    assert found["targets"][0]["verdict"] == "missed" and found["losses"] == report.losses(
        report.runs_of(tmp_path)
    )


def test_a_committed_profile_is_linked_from_its_benchmark(plant, tmp_path):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "moe.md").write_text("")
    runs = plant("moe", "2026-11-01T00:00:00Z", *moe(5.0))
    assert "(profiles/moe.md)" in report.page(
        runs, report.profiles_beside(tmp_path / "page.md")
    ) and "profiles/" not in report.page(runs)
    # the own profile of a class of CPU comes first
    (tmp_path / "profiles" / f"moe-{runs[0].device}.md").write_text("")
    text = report.page(runs, report.profiles_beside(tmp_path / "page.md"))
    assert f"(profiles/moe-{runs[0].device}.md)" in text and "(profiles/moe.md)" not in text


@pytest.mark.parametrize("name", ["moe", "dense", "load", "start", "decode", "growth", "profile", "report"])
def test_every_subcommand_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, "--help"])
    assert ended.value.code == 0 and f"unfreeze dev bench {name}" in capsys.readouterr().out


def test_bench_names_its_subcommands(capsys):
    assert cli.main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"unfreeze dev bench {name}" in said for name in BENCHMARKS)
    assert cli.main(["bench", "mo"]) == 2
    assert "nearest: 'moe'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="got nothing"):
        from benchmarks import main
        from unfreeze.core.command import Common

        main([], Common())
