"""bench decode end to end on a tiny shape."""

import pytest
import torch

from benchmarks.cases import decode
from benchmarks.harness.rows import read
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice.choose import device_key


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tiny_sizes):
    path = tmp_path_factory.mktemp("decode") / "rows.jsonl"
    decode.measure(
        decode.Config(append=str(path), cases=("1x8", "3x8"), new=4, rounds=2, threads=1),
        Common(quiet=True),
        tiny_sizes,
    )
    return read(path)


@pytest.mark.nightly
def test_each_side_and_case_has_a_row(rows):
    assert [(row.settings["batch"], row.side) for row in rows] == [
        (1, "unfreeze"),
        (1, "transformers"),
        (3, "unfreeze"),
        (3, "transformers"),
    ]
    for row in rows:
        r = row.results
        assert (
            r["slowest"] <= r["tokens_per_second"] <= r["fastest"]
            and r["prompt_seconds"] > 0
            and r["peak_bytes"] > 10**7
        )
    assert rows[3].results["first_side_speed"] == pytest.approx(
        rows[2].results["tokens_per_second"] / rows[3].results["tokens_per_second"]
    )


@pytest.mark.nightly
def test_what_both_sides_chose_is_nearly_float32s_choice(rows):
    """Logits of a random model spread over about 1; bf16 moves them by 2^-8 of that a layer, so a chosen
    token is at most a few hundredths behind."""
    for row in rows:
        assert row.results["correctness"]["worst of them, nats less likely"] < 0.1, (
            row.side,
            row.results["correctness"],
        )


def test_the_judge_sees_a_wrong_token(tmp_path, tiny_sizes):
    from benchmarks.harness import checkpoints, kimi

    with checkpoints.checkpoints(str(tmp_path), kimi.config(**tiny_sizes), kimi.config(**tiny_sizes)) as (
        folder,
        _,
    ):
        prompt = decode.prompts_of(1, 8, 256)
        good = decode.ours(str(folder)).calls["generate"](prompt, 4)["tokens"]
        score = decode.judge(str(folder)).calls["score"]
        bad = [[(good[0][0] + 1) % 256, *good[0][1:]]]
        assert (
            score(prompt, good)["nats"] < 0.1 < score(prompt, bad)["nats"] and score(prompt, bad)["other"] > 0
        )


@pytest.mark.parametrize("text", ["64", "0x64", "1x", "1 x 64", "ax4"])
def test_a_case_that_is_none_is_named(text):
    with pytest.raises(ConfigError, match="is not BATCHxPROMPT"):
        decode.parse_case(text)


@pytest.mark.nightly
def test_without_a_device_everything_runs_on_the_cpu(rows):
    assert (
        {row.settings["device"] for row in rows}
        == {"cpu"}
        == {row.machine.device.split("-")[0] for row in rows}
    )


def test_graphs_on_a_cpu_are_refused_and_launched_steps_run(tmp_path, tiny_sizes):
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        decode.measure(decode.Config(sides=("unfreeze-graphs",)), Common(quiet=True), tiny_sizes)
    path = tmp_path / "rows.jsonl"
    config = decode.Config(
        append=str(path), sides=("unfreeze-launched",), cases=("1x8",), new=4, rounds=1, threads=1
    )
    decode.measure(config, Common(quiet=True), tiny_sizes)
    assert [row.side for row in read(path)] == ["unfreeze-launched"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_refused_before_the_work(tiny_sizes):
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        decode.measure(decode.Config(device="cuda"), Common(quiet=True), tiny_sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_all_sides_run_on_a_gpu(tmp_path, tiny_sizes):
    path = tmp_path / "rows.jsonl"
    sides = ("unfreeze", "unfreeze-launched", "unfreeze-graphs", "transformers")
    config = decode.Config(append=str(path), sides=sides, cases=("1x8",), new=8, rounds=1, device="cuda")
    decode.measure(config, Common(quiet=True), tiny_sizes)
    rows = read(path)
    assert [row.side for row in rows] == list(sides) and {row.machine.device for row in rows} == {
        device_key(torch.device("cuda"))
    }
    for row in rows:
        assert row.results["correctness"]["worst of them, nats less likely"] < 0.1
