"""A release that sees is trained on text and still sees: vision tensors bit for bit, and an image question's
logits those of transformers with the trained text weights put in."""

import copy
import json
import shutil
import warnings

import peft
import pytest
import torch
from family_cases import DOCUMENTS, batch_of
from safetensors.torch import load_file, save_file
from vision_cases import SIGHTED, released

from unfreeze import cli, models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate.open import open_model
from unfreeze.models import publish

BUILT = [name for name in SIGHTED if name in models.WRAPPERS]
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

STEPS = 2


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """name -> (transformers' model, its release's folder with tiny-k2's tokenizer); made once."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "base"
            made[name] = released(SIGHTED[name], folder), folder
            for file in ("tiktoken.model", "tokenizer_config.json"):
                shutil.copy(TINY_K2 / file, folder)
            for file in PROCESSOR:
                (folder / file).write_text(json.dumps({"patch_size": 14, "of": file}))
        return made[name]

    return make


@pytest.fixture(scope="module")
def adapters(bases, chat_rows, tmp_path_factory):
    """name -> a run of some steps that trained adapters on that base; made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(f"{name}-run") / "run"
            line = command(bases(name)[1], chat_rows, made[name], "--lora.rank", 4, "--steps", 6, "--quiet")
            assert cli.main([str(word) for word in line]) == 0
        return made[name]

    return make


def command(base, rows, out, *flags):
    line = ["sft", "--model", base, "--data", rows, "--out", out, "--steps", STEPS, "--tokens-per-step", 128]
    line += ["--sequence-length", 128, "--dtype", "float32", "--threads", 1, "--watch.samples", 0]
    return [*line, "--learning-rate", "1e-2", *flags]


def read(name, folder):
    """(transformers' model of a folder, its logits of the image question); every tensor is found."""
    model, info = SIGHTED[name].model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval(), logits(name, model)


def logits(name, model):
    with torch.no_grad():
        return model(**SIGHTED[name].question()).logits


def with_text(name, reference, state):
    """transformers' base with `state`, our parameters by name, in its text model."""
    case = SIGHTED[name].case
    model = copy.deepcopy(reference)
    theirs = {case.theirs(key): case.turned(key, tensor) for key, tensor in state.items()}
    theirs = {name.replace(".decay.", "."): tensor for name, tensor in theirs.items()}
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # a tied head is not among them
            parameter.copy_(theirs.pop(key, parameter))
    assert theirs.keys() <= {"lm_head.weight"}
    return model


def check_carried(name, base, out):
    """The vision part of `out` is that of `base` to the bit, config.json and the processor's files too."""
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    beside = [key for key in before if key.startswith(SIGHTED[name].beside)]
    assert before.keys() == after.keys() and len(beside) > 5
    assert all(
        before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in beside
    )
    text = [key for key in before if key not in beside and key.endswith("_proj.weight")]
    assert not any(torch.equal(before[key], after[key]) for key in text)  # all was trained
    for file in ("config.json", *PROCESSOR):
        assert json.loads((out / file).read_text()) == json.loads((base / file).read_text())


def check_text(model, out):
    """Text logits of transformers' model are ours of the folder."""
    ours = open_model(open_checkpoint(out))
    with torch.no_grad():
        theirs = torch.cat([model(input_ids=torch.tensor([document])).logits[0] for document in DOCUMENTS])
        found = ours.logits(ours.hidden(batch_of(DOCUMENTS)))
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", BUILT)
def test_after_training_all_text_weights_it_sees_as_before(name, bases, chat_rows, tmp_path, unfreeze_json):
    reference, base = bases(name)
    unfreeze_json(*command(base, chat_rows, tmp_path / "run", "--train", "all"))
    out = tmp_path / "run" / "model"
    check_carried(name, base, out)
    state = load_file(tmp_path / "run" / "state" / f"step-{STEPS:06d}" / "tensors.safetensors")
    wanted = logits(name, with_text(name, reference, trained(state)))
    model, found = read(name, out)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (found - logits(name, reference)).abs().max() > 0.1  # control: the base answers otherwise
    check_text(model, out)


def trained(state):
    return {key.removeprefix("model."): tensor for key, tensor in state.items() if key.startswith("model.")}


@pytest.mark.parametrize("name", BUILT)
def test_merged_it_sees_as_peft_over_transformers_does(name, bases, adapters, tmp_path, unfreeze_json):
    base, run, out = bases(name)[1], adapters(name), tmp_path / "out"
    unfreeze_json("merge", run, "--out", out, "--no-check")
    check_carried(name, base, out)
    again, plain = read(name, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = logits(name, peft.PeftModel.from_pretrained(again, run / "adapter").eval())
    model, found = read(name, out)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (found - plain).abs().max() > 0.1
    check_text(model, out)
    pairs = [key for key, _ in again.named_parameters() if "lora_" in key]
    assert pairs and not any(key.startswith(("vision_", "model.v")) for key in pairs)  # peft left the tower


@pytest.mark.parametrize("to", ["bf16", "int4"])
@pytest.mark.parametrize("name", [name for name in BUILT if name not in ("qwen3_vl_moe", "llama4")])
def test_merged_into_another_format_the_tower_stays(name, to, bases, adapters, tmp_path, unfreeze_json):
    """Experts of the two left out are stacked on disk, and int4 has a matrix per expert."""
    out = tmp_path / "out"
    unfreeze_json("merge", adapters(name), "--to", to, "--out", out, "--no-check")
    before, after = (load_file(folder / "model.safetensors") for folder in (bases(name)[1], out))
    beside = [key for key in before if key.startswith(SIGHTED[name].beside)]
    assert all(
        before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in beside
    )
    model, sees = read(name, out)
    ours = open_model(open_checkpoint(out))
    document = DOCUMENTS[0]
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([document])).logits[0].float()
        found = ours.logits(ours.hidden(batch_of([document]))).float()
    # transformers expands int4 to bfloat16
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4 if to == "bf16" else 0.1)
    assert sees.isfinite().all()


def test_names_as_transformers_4_52_wrote_them_are_kept(bases, chat_rows, tmp_path, unfreeze_json):
    """Checkpoints of Gemma 3 and Mistral 3 with "model." before the names, as other trainers publish them."""
    base = tmp_path / "base"
    shutil.copytree(bases("gemma3")[1], base)
    tensors = load_file(base / "model.safetensors")
    as_in_memory = {
        key.replace("language_model.model.", "model.language_model.")
        if key.startswith("language_model.")
        else f"model.{key}": tensor
        for key, tensor in tensors.items()
    }
    save_file(as_in_memory, base / "model.safetensors", {"format": "pt"})
    unfreeze_json(*command(base, chat_rows, tmp_path / "run", "--train", "all", "--steps", 1))
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert after.keys() == as_in_memory.keys()
    tower = [key for key in after if key.startswith(("model.vision", "model.multi"))]
    assert len(tower) > 5 and all(torch.equal(after[key], as_in_memory[key]) for key in tower)
    check_text(read("gemma3", tmp_path / "run" / "model")[0], tmp_path / "run" / "model")


def test_without_what_is_carried_transformers_lacks_the_tower(
    bases, chat_rows, tmp_path, unfreeze_json, monkeypatch
):
    """Control arm of the tests above."""
    monkeypatch.setattr(publish, "carried", lambda model, manifest: iter(()))
    base = bases("mistral3")[1]
    unfreeze_json(*command(base, chat_rows, tmp_path / "run", "--train", "all", "--steps", 1))
    with pytest.raises(AssertionError, match="vision_tower"):
        read("mistral3", tmp_path / "run" / "model")


def test_from_random_weights_only_a_language_model_is_trained(bases, chat_rows, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(bases("mistral3")[1], base, ignore=shutil.ignore_patterns("*.safetensors"))
    line = ["pretrain", "--model", base, "--data", chat_rows, "--out", tmp_path / "run", "--steps", 1]
    assert cli.main([str(word) for word in [*line, "--quiet"]]) == 2
    assert "there are no weights of the parts around it" in capsys.readouterr().err
