"""Runs with --quantize: the numbers of a run on the folder that `unfreeze quantize` writes, and what is refused."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli, models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.commands.demo import TINY_K2
from unfreeze.compress.quantize.onload import packed_on_load
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.compress.quantize.write import inputs_of, write
from unfreeze.config.grpo import Config as GrpoConfig
from unfreeze.config.lora import LoraConfig
from unfreeze.config.prefer import Config as PreferConfig
from unfreeze.config.sft import Config
from unfreeze.core.command import Common
from unfreeze.core.errors import DoesNotFit
from unfreeze.job.opening.device import load_shown
from unfreeze.job.planning.plan import Planning, if_packed
from unfreeze.job.trained import Adapters
from unfreeze.parallel import machine
from unfreeze.parallel.plan import refuse_if_too_large

SMALL = {
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MOE = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MODULES = {"llama": (), "moe": ("all-linear",)}


@pytest.fixture(scope="module")
def folders(merging, tmp_path_factory) -> dict[str, Path]:
    """Two bf16 bases with a tokenizer, and as "<name>-int4" the folders that quantize writes of them."""
    root, found = tmp_path_factory.mktemp("bases"), {}
    for name, kind, settings in (("llama", "Llama", SMALL), ("moe", "Qwen3Moe", SMALL | MOE)):
        tensors, config = merging.random_model(kind, settings)
        half = {key: tensor.bfloat16() for key, tensor in tensors.items()}
        found[name] = merging.sharded(root / name, half, config | {"dtype": "bfloat16"})
        for file in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(TINY_K2 / file, found[name] / file)
        manifest, found[f"{name}-int4"] = open_checkpoint(found[name]), root / f"{name}-int4"
        work = quantize_work(manifest, "int4", MODULES[name])
        write(work, found[f"{name}-int4"], inputs_of(manifest, "int4", MODULES[name]), None)
    return found


@pytest.fixture(scope="module")
def trained(folders, chat_rows, tmp_path_factory):
    """(base, more flags) -> the folder of a run of two steps."""
    known: dict[tuple[str, ...], Path] = {}

    def make(base: str, *more: str) -> Path:
        if (base, *more) not in known:
            out = tmp_path_factory.mktemp("runs") / base
            assert cli.main(command(folders[base], chat_rows, out, *more)) == 0
            known[base, *more] = out
        return known[base, *more]

    return make


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    line = (
        f"sft --quiet --model {model} --data {data} --out {out} --tokens-per-step 256 --steps 2 --lora.rank 2"
    )
    return [*f"{line} --watch.samples 0 --dtype float32 --learning-rate 1e-2".split(), *more]


def on_load(base: str) -> list[str]:
    return ["--quantize", "int4", *(["--quantize-modules", *MODULES[base]] if MODULES[base] else [])]


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def tensors(folder: Path) -> dict[str, bytes]:
    manifest = open_checkpoint(folder)
    return {
        name: bytes(stored_tensor(info).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, info in manifest.tensors.items()
    }


@pytest.mark.parametrize("base", ["llama", "moe"])
def test_a_run_equals_that_on_the_quantized_folder(trained, base: str) -> None:
    """Losses and adapters bit for bit; those of the base as it was released are others."""
    ours, theirs = trained(base, *on_load(base)), trained(f"{base}-int4")
    assert losses(ours) == losses(theirs) and len(losses(ours)) == 2
    adapters = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (ours, theirs)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    if base == "llama":
        assert losses(trained("llama")) != losses(ours)  # the control arm

    # what is said, before and after
    released, packed = (open_checkpoint(run_base(run)) for run in (ours, theirs))
    assert "once they are packed to INT4" in events(ours, "plan")[0]["start"][0]
    assert events(ours, "plan")[0]["terms"]["base"] == events(theirs, "plan")[0]["terms"]["base"]
    assert events(ours, "load")[0]["bytes"] == released.nbytes > events(theirs, "load")[0]["bytes"]
    assert packed.nbytes < released.nbytes
    own = json.loads((ours / "adapter" / "base_packed.json").read_text())
    assert own["format"] == "int4" and not (theirs / "adapter" / "base_packed.json").exists()
    assert "trained against the base in INT4" in (ours / "adapter" / "README.md").read_text()
    assert "INT4" not in (theirs / "adapter" / "README.md").read_text().partition("## Use")[2]
    named = json.loads((ours / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(released.path)


def run_base(run: Path) -> str:
    return json.loads((run / "resolved_config.json").read_text())["model"]


def test_it_merges_as_the_quantized_folder_does(trained, tmp_path) -> None:
    """same: the format it was trained in. Without the packing, int4 is another checkpoint."""
    for to in ("same", "bf16", "int4"):
        for name, run in (("ours", trained("moe", *on_load("moe"))), ("theirs", trained("moe-int4"))):
            out = tmp_path / f"{name}-{to}"
            assert cli.main(["merge", str(run), "--to", to, "--out", str(out), "--no-check", "--quiet"]) == 0
        assert tensors(tmp_path / f"ours-{to}") == tensors(tmp_path / f"theirs-{to}"), to
        assert open_checkpoint(tmp_path / f"ours-{to}").is_packed() is (to != "bf16")
    run = tmp_path / "copy"
    shutil.copytree(trained("moe", *on_load("moe")), run)
    (run / "adapter" / "base_packed.json").unlink()
    words = ["merge", str(run), "--to", "bf16", "--out", str(tmp_path / "plain"), "--no-check", "--quiet"]
    assert cli.main(words) == 0
    assert tensors(tmp_path / "plain") != tensors(tmp_path / "ours-bf16")


def test_an_export_and_a_continued_run_know_the_packing(trained, folders, chat_rows, tmp_path) -> None:
    run = trained("moe", *on_load("moe"))
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert json.loads((tmp_path / "out" / "base_packed.json").read_text())["format"] == "int4"
    # chat, generate and unfreeze.load answer as it was trained
    shown = load_shown(str(run), "float32", "cpu", Common(quiet=True))
    assert shown.manifest.is_packed() and unfreeze.load(run).manifest.is_packed()

    fields = {"model": str(folders["moe"]), "data.files": [str(chat_rows)]}
    config = Config.model_validate(fields | {"adapter": str(tmp_path / "out")})
    assert (config.quantize, config.quantize_modules) == ("int4", ("all-linear",))
    with pytest.raises(ValueError, match=r"quantize = 'fp8', but the adapter in .* has 'int4'"):
        Config.model_validate(fields | {"adapter": str(run), "quantize": "fp8"})


def test_a_finished_run_is_known_again_and_another_packing_is_refused(
    trained, folders, chat_rows, capsys
) -> None:
    run = trained("llama", *on_load("llama"))
    words = command(folders["llama"], chat_rows, run, "--json")
    assert cli.main([*words, *on_load("llama")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["already_finished"]
    for more in ([], ["--quantize", "fp8"]):
        assert cli.main([*words, *more]) != 0
        assert "quantize can never change within a run" in capsys.readouterr().err


def test_a_run_that_stopped_goes_on_to_the_bit(trained, folders, chat_rows, tmp_path) -> None:
    """Between its steps, before the second save: the base is packed again, from the same files."""

    def stop(state, result) -> None:
        if state.step == 2:
            raise Stopped

    fields = {
        "model": str(folders["llama"]),
        "data": str(chat_rows),
        "out": tmp_path / "run",
        "quantize": "int4",
    }
    fields |= {"tokens_per_step": 256, "steps": 2, "lora.rank": 2, "watch.samples": 0, "dtype": "float32"}
    fields |= {"learning_rate": 1e-2, "save.every": 1, "quiet": True}
    with pytest.raises(Stopped):
        unfreeze.sft(**fields, on_step=[stop])
    run, whole = unfreeze.sft(**fields).path, trained("llama", *on_load("llama"))
    assert losses(run)[-1] == losses(whole)[-1] and len(events(run, "load")) == 2
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Stopped(Exception):
    pass


REFUSED = {
    "llama --quantize int4 --train all": "every weight trains, and packed weights are frozen",
    "llama --quantize-modules all-linear": "quantize_modules has no effect without quantize",
    "llama --quantize int4 --quantize-modules experts": "a llama is dense, without experts",
    "moe --quantize int4 --place.experts disk": "quantize packs the experts while they are loaded",
    "moe-int4 --quantize int4": "is quantized already (int4-pack-quantized)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_before_work(folders, chat_rows, tmp_path, capsys, words: str) -> None:
    base, *more = words.split()
    line = command(folders[base], chat_rows, tmp_path / "run", *more)
    assert cli.main(line) != 0
    said = capsys.readouterr().err
    assert REFUSED[words] in said and len(said.splitlines()) <= 2
    assert not (tmp_path / "run" / "events.jsonl").exists() or not events(tmp_path / "run", "load")


def test_every_recipe_with_adapters_has_the_field(folders, chat_rows, tmp_path) -> None:
    fields = {"model": str(folders["moe"]), "data.files": [str(chat_rows)], "quantize": "int4"}
    (tmp_path / "reward.py").write_text("def reward(completion): return 0.0\n")
    from unfreeze.recipes import grpo, prefer, sft

    for recipe, config in (
        (sft, Config.model_validate(fields)),
        (prefer, PreferConfig.model_validate(fields)),
        (grpo, GrpoConfig.model_validate(fields | {"reward": str(tmp_path / "reward.py")})),
    ):
        parts = recipe.parts(config)
        start = parts.start(config.model, Common(quiet=True))
        assert start.on_load is not None and start.on_load.format == "int4" and start.is_packed()
        parts.close()


WIDE = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 64,
}


def test_what_does_not_fit_names_quantize_with_its_bytes(tmp_path, monkeypatch) -> None:
    """Between the two plans: the remedy. Below both, and where it fits: none."""
    config = transformers.LlamaConfig(**WIDE)
    with torch.device("meta"):
        wanted = transformers.LlamaForCausalLM(config).state_dict()
    zeros = torch.zeros(1024 * 4096, dtype=torch.bfloat16)
    save_file(
        {n: zeros[: t.numel()].view(t.shape).clone() for n, t in wanted.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"dtype": "bfloat16"}))
    start = open_checkpoint(tmp_path)
    fields = {"model": str(tmp_path), "data.files": ["d.jsonl"], "training.tokens_per_step": 64}
    lora = LoraConfig(rank=2)
    subject = Config.model_validate(fields | {"memory.dtype": "bfloat16"}), Adapters(lora, 0)
    shape = models.shape(start.config)
    here = machine.hardware("cpu")

    def planned(manifest, available: int):
        monkeypatch.setattr(
            machine, "hardware", lambda device: replace(here, available=available, limit="memory")
        )
        planning = Planning(*subject, manifest, shape, torch.device("cpu"))
        return planning, planning.first()[1]

    large = planned(start, 2**40)[1].total
    small = planned(packed_on_load(start, "int4"), 2**40)[1].total
    assert small < 0.8 * large
    planning, plan = planned(start, int((large + small) / 2 / 0.92))
    ((flags, words),) = others = if_packed(planning, plan)
    assert flags == "--quantize int4" and words.startswith("--quantize int4 (")
    with pytest.raises(DoesNotFit, match=r"Fits with --quantize int4 \(") as refused:
        refuse_if_too_large(plan, others)
    assert refused.value.next == "--quantize int4"
    for available in (2**40, int(small / 2)):
        assert if_packed(*planned(start, available)) == []


def test_plan_says_what_fits_after(folders, capsys) -> None:
    def plan(*words: str) -> dict:
        code = cli.main(["plan", *map(str, words), "--json", "--quiet", "--tokens-per-step", "256"])
        assert code in (0, 2)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    packing = ("--quantize", "int4", "--quantize-modules", "all-linear")
    before, after, folder = plan(folders["moe"]), plan(folders["moe"], *packing), plan(folders["moe-int4"])
    assert after["bytes"]["total"] == folder["bytes"]["total"] < before["bytes"]["total"]
    assert after["bytes"]["experts"] == folder["bytes"]["experts"]
    assert any("once they are packed to INT4 (loading takes at most" in note for note in after["notes"])
    alone = plan(folders["moe"] / "config.json", *packing)
    assert alone["bytes"]["total"] == after["bytes"]["total"]


@pytest.mark.nightly
@pytest.mark.parametrize("place", [[], ["--place.split", "2", "--place.rest", "peers"]])
def test_two_processes_pack_as_one_folder(folders, chat_rows, tmp_path, place: list[str]) -> None:
    """Each matrix is packed by one process: alone, and with shared experts and gathered layers."""
    runs = []
    for name, base, more in (("ours", "moe", on_load("moe")), ("theirs", "moe-int4", [])):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = command(folders[base], chat_rows, tmp_path / name, "--micro-batches", "2", *place, *more)
        start = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port} -m unfreeze".split()
        done = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        runs.append(tmp_path / name)
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == 2
    (load,) = events(runs[0], "load")
    assert load["bytes"] == open_checkpoint(folders["moe"]).nbytes == sum(load["bytes_by_rank"])
