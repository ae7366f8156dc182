"""A run that was trained through the rounding of its merge is used with that rounding, by every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.adapters import attach, sites
from unfreeze.adapters.several import Several
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands import chat, eval_models, serve, serve_models
from unfreeze.config.adapter import ROUNDED, RoundedAs, rounded_as
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.data import Example, load_tokenizer, pack
from unfreeze.generate.model import load_opened
from unfreeze.generate.open import open_model
from unfreeze.job.merge_aware import (
    adapted_of,
    bytes_as_trained,
    compute_as_trained,
    roundings_of,
    trained_as,
)
from unfreeze.job.opening.source import open_as_trained
from unfreeze.job.trained import Adapters
from unfreeze.models import meta_model, shape
from unfreeze.parallel.processes.mesh import ONE
from unfreeze.teach.second import Beside
from unfreeze.teach.teacher import Asked, AsTrained

pytestmark = pytest.mark.usefixtures("fewer_layers")

IDS = list(range(40, 120))
LORA = LoraConfig(rank=4, targets=("experts",), merge_aware="same", merge_aware_from=0.5)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Adapters of one model as a run writes them, before its rounding and after: "lora" and "rounded"."""
    from unfreeze.adapters.merge_aware import begin

    folder, manifest = tmp_path_factory.mktemp("written"), open_checkpoint(unfreeze.TINY_K2)
    model, trained = open_model(manifest), Adapters(LORA, 0)
    attach(model, LORA, 0)
    with torch.no_grad():
        for site in sites(model):
            for name, factor in site.adapter.named_parameters():
                factor.normal_(0, 0.05 if name.endswith("B") else 0.1, generator=torch.Generator())
    state = SimpleNamespace(
        model=model, optimizer=SimpleNamespace(masters=None), run=SimpleNamespace(path=folder)
    )
    trained.write(state, manifest, str(unfreeze.TINY_K2), ONE, folder / "lora")
    begin(model, roundings_of(LORA, manifest, model, adapted_of(model)))
    trained.write(state, manifest, str(unfreeze.TINY_K2), ONE, folder / "rounded")
    assert trained_as(model, LORA) == RoundedAs("same", "keep-change")
    return folder


@pytest.fixture(scope="module")
def merged(written):
    flags = ["--to", "same", "--scales", "keep-change", "--no-check", "--quiet", "--out"]
    assert cli.main(["merge", str(written / "rounded"), *flags, str(written / "merged")]) == 0
    return written / "merged"


def logits(model) -> torch.Tensor:
    with model.decoder.looking():
        return model.logits([IDS])[0]


def plain(folder: Path):
    """The adapter as LoRA."""
    opened, manifest = open_as_trained(str(folder), None)
    return load_opened(opened, manifest, torch.float32, torch.device("cpu"))


def test_the_opened_run_has_the_logits_of_the_merged_folder(written, merged):
    ours, theirs = unfreeze.load(written / "rounded", dtype="float32"), unfreeze.load(merged, dtype="float32")
    assert (logits(ours) - logits(theirs)).abs().max() < 2e-4
    # control arm: its factors as LoRA, which the run before its rounding is
    lora = plain(written / "rounded")
    assert (logits(lora) - logits(theirs)).abs().max() > 1e-2
    before = unfreeze.load(written / "lora", dtype="float32")
    assert torch.equal(logits(before), logits(lora))


def test_eval_rounds_a_run_also_on_the_base_that_it_has_scored(written, merged):
    scored = eval_models.subjects_of([str(written / "rounded")], "", "float32", lambda line: None)
    base, run = scored.models
    place = torch.float32, torch.device("cpu")
    before = base.loaded(None, *place)
    rounded = logits(run.loaded(before, *place))
    assert (rounded - logits(unfreeze.load(merged, dtype="float32"))).abs().max() < 2e-4
    lora = eval_models.subjects_of([str(written / "lora")], "", "float32", lambda line: None).models[-1]
    assert lora.digest != run.digest  # scores of the one are not taken for the other's


def test_a_teacher_computes_as_it_was_trained(written, tmp_path):
    """As the run that unfreeze.load opens: on the student's own base, and on one with other weights."""
    start = open_checkpoint(unfreeze.TINY_K2)
    batch = pack([Example(IDS, [0.0, *[1.0] * (len(IDS) - 1)])])
    student = open_model(start)
    attach(student, LORA, 1)

    def says(name: str, as_trained) -> tuple[Asked, torch.Tensor]:
        teacher = Asked(str(written / name), lambda says, words: says, shares=True, as_trained=as_trained)
        teacher.check(start, load_tokenizer(start.path))
        log_q = teacher.objective(student, torch.device("cpu"), "float32")(batch)
        loaded = teacher.load(torch.device("cpu"), "float32")(batch)
        rows = slice(0, len(batch.supervised()))
        assert torch.equal(log_q(rows, torch.empty(0)), loaded(rows, torch.empty(0)))
        return teacher, log_q(rows, torch.empty(0))

    def of(model) -> torch.Tensor:
        return logits(model)[batch.supervised()].log_softmax(-1)

    as_trained = AsTrained(open_as_trained, compute_as_trained, bytes_as_trained)
    _, own = says("rounded", as_trained)
    assert own.shape[0] > 70 and torch.equal(own, of(unfreeze.load(written / "rounded", dtype="float32")))
    lora = of(plain(written / "rounded"))
    assert torch.equal(says("rounded", None)[1], lora)  # control arm: its factors as LoRA
    assert (own - lora).abs().max() > 1e-2
    assert torch.equal(says("lora", as_trained)[1], lora)
    # a copy of the base with its rounding, where LoRA shares the student's
    beside = Beside(start, 128, 128, torch.float32, torch.device("cpu"), head_trains=False)
    sizes = {name: says(name, as_trained)[0].aside(beside).stays for name in ("lora", "rounded")}
    meta = meta_model(shape(start.config), start, torch.float32)
    rounding = bytes_as_trained(meta, written / "rounded", torch.float32, torch.device("cpu"))
    assert rounding > 0 and sizes["rounded"] - sizes["lora"] > rounding + start.nbytes // 2


def test_a_run_that_stopped_before_its_rounding_is_lora(written, tmp_path, capsys):
    """What it is comes from the step it reached, not from its flags."""
    assert rounded_as(written / "lora") is None and rounded_as(written / "rounded").scales == "keep-change"
    for name, warned in (("lora", False), ("rounded", True)):
        flags = ["--to", "bf16", "--no-check", "--out", str(tmp_path / name)]
        assert cli.main(["merge", str(written / name), *flags]) == 0
        assert ("trained for another merge" in capsys.readouterr().err) == warned
    cards = {name: (written / name / "README.md").read_text() for name in ("lora", "rounded")}
    assert "through the rounding" in cards["rounded"] and "through the rounding" not in cards["lora"]
    assert "`unfreeze merge RUN --to same --scales keep-change` writes it" in cards["rounded"]


def test_an_export_is_lora_and_its_card_says_so(written, tmp_path):
    out = tmp_path / "export"
    assert cli.main(["export", str(written / "rounded"), "--out", str(out), "--quiet"]) == 0
    assert rounded_as(out) is None
    assert "an export is the LoRA adapter alone, whose answers differ" in (out / "README.md").read_text()
    assert torch.equal(logits(plain(written / "lora")), logits(unfreeze.load(out, dtype="float32")))


def test_it_is_served_by_itself_and_refused_beside_others(written, capsys):
    rounded, lora = str(written / "rounded"), str(written / "lora")
    alone = serve_models.sources_of(serve.Config(models=(rounded,)), lambda line: None)
    assert alone.base.adapter == written / "rounded" and not alone.places and alone.name == "rounded"
    both = serve_models.sources_of(serve.Config(models=(str(unfreeze.TINY_K2), lora)), lambda line: None)
    assert both.places == {"lora": written / "lora"}  # control arm
    merge = f"unfreeze merge {rounded} --to same --scales keep-change"
    for models in ((rounded, lora), (lora, rounded), (str(unfreeze.TINY_K2), rounded)):
        with pytest.raises(ConfigError, match="by itself or merged") as refused:
            serve_models.sources_of(serve.Config(models=models), lambda line: None)
        assert refused.value.next == merge and len(refused.value.message) <= 140 + len(rounded)
        with pytest.raises(ConfigError, match="by itself or merged"):
            chat.refuse_rounded(chat.Config(model=models[0], adapters=models[1:]))
    chat.refuse_rounded(chat.Config(model=rounded))
    chat.refuse_rounded(chat.Config(model=str(unfreeze.TINY_K2), adapters=(lora,)))
    several = Several(open_model(open_checkpoint(unfreeze.TINY_K2)))
    several.load("lora", lora)
    with pytest.raises(AdapterError, match="cannot be one of several"):  # a run that began to round meanwhile
        several.replace("lora", rounded)


def test_a_base_in_another_format_is_refused_by_name(written, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(written / "rounded", folder)
    (folder / ROUNDED).write_text(json.dumps({"format": "fp8", "scales": "refit"}))
    with pytest.raises(AdapterError, match=r"the rounding of a merge \(fp8\)"):
        unfreeze.load(folder)
    for table in (
        {"format": "fp9", "scales": "refit"},
        {"format": "", "scales": "refit"},
        {"format": "int4"},
    ):
        (folder / ROUNDED).write_text(json.dumps(table))
        with pytest.raises(AdapterError, match=ROUNDED) as refused:
            rounded_as(folder)
        assert refused.value.next
