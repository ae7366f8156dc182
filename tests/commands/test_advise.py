"""unfreeze advise: the published law from numbers, a run's file or a folder; time, cost, and what it refuses."""

import json

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2


def refused(capsys, *arguments):
    assert cli.main(["advise", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_the_issues_example(unfreeze_json):
    advice = unfreeze_json("advise", "--params", "26e6", "--tokens", "1e9")
    assert advice["learning_rate"] == pytest.approx(5.4e-3, rel=0.01)
    assert advice["tokens_per_step"] == pytest.approx(80e3, rel=0.01)
    assert advice["chinchilla_tokens"] == 520e6 and len(advice["outside"]) == 2
    assert advice["times"][0]["seconds"] is None  # nothing is known of this model here


def test_the_lines_say_the_range_and_the_flags_to_copy(capsys):
    assert cli.main(["advise", "--params", "26e6", "--tokens", "1e9"]) == 0
    lines = capsys.readouterr().out
    assert "26 M parameters are outside the fit (60 M to 1.1 B): an extrapolation" in lines
    assert "as flags: --learning-rate 0.0054 --tokens-per-step 79878 --steps 12519" in lines
    assert cli.main(["advise", "--params", "1e9", "--tokens", "1e10"]) == 0
    assert "outside" not in capsys.readouterr().out


def test_time_and_cost_of_hardware_by_its_data_sheet(unfreeze_json):
    flags = "--params 1e9 --hardware 8xH100 1xH100 --usd-per-hour 16".split()
    eight, one = unfreeze_json("advise", *flags)["times"]
    # 6 N D over 8 cards of 989 TFLOP/s at 40 %, D = 20 N
    assert eight["seconds"] == pytest.approx(6 * 1e9 * 20e9 / (8 * 989e12 * 0.4))
    assert one["seconds"] == pytest.approx(8 * eight["seconds"])
    assert eight["usd"] == pytest.approx(eight["seconds"] / 3600 * 16)


@pytest.fixture
def run_file(tmp_path):
    folder = tmp_path / "tok"
    folder.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_K2 / name).read_bytes())
    shape = '[shape]\nfamily = "qwen3"\nhidden_size = 64\nnum_hidden_layers = 2\n'
    data = '[data]\nfiles = "book.txt"\n[training]\nsteps = 100\ntokens_per_step = 2048\n'
    (tmp_path / "run.toml").write_text(f'tokenizer = "{folder}"\n{shape}{data}')
    return tmp_path / "run.toml"


def test_a_runs_file_has_parameters_and_tokens(run_file, unfreeze_json):
    advice = unfreeze_json("advise", run_file, "--hardware", "1xH100")
    # per layer 4 D², 3 D I, 2 D + 2 head_dim of norms; and the last norm
    assert advice["parameters"] == 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64 + 2 * 16) + 64
    assert advice["tokens"] == 100 * 2048 and advice["times"][0]["source"] == "planned"
    assert unfreeze_json("advise", run_file, "--tokens", "1e6")["tokens"] == 1e6
    assert (
        unfreeze_json("plan", run_file, "--hardware", "1xH100")["parameters"]["without_embeddings"]
        == (advice["parameters"])
    )


def test_a_folder_has_parameters(tmp_path, unfreeze_json):
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    from unfreeze.models.from_shape import config_of

    config = config_of("llama", shape, {}, vocabulary=500, positions=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    advice = unfreeze_json("advise", tmp_path)
    assert advice["tokens"] == 20 * advice["parameters"] == advice["chinchilla_tokens"]


def test_what_it_refuses(capsys, tmp_path):
    assert "needs the size of one model" in refused(capsys)
    assert "must be more than 0" in refused(capsys, "--params", "0")
    assert "is neither a run's TOML file nor a model" in refused(capsys, "26000000")
    assert "is packed" in refused(capsys, TINY_K2)
    assert "expected 1 to 1e+18" in refused(capsys, "--params", "1e30")
