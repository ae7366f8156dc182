"""unfreeze.load and Model: real files in ../shared, and checkpoints written here by transformers, tokenizers
and our own INT4 quantizer."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters.layouts import save_adapter
from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.drill.sandbox import TINY_K2
from unfreeze.models import notes
from unfreeze.quant.int4 import Int4

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
STORIES, KIMI = SHARED / "stories260k", SHARED / "tiny-kimi-int4"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is absent")
needs_kimi = pytest.mark.skipif(not KIMI.is_dir(), reason=f"{KIMI} is absent")
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day,"
    " she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily,"
    " let's go to the park.\" Lily was sad "
)
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
SEQUENCES = [[5, 17, 3, 88, 41, 2, 9], [11, 7], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69]]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder):
    """A byte-level BPE of 256 bytes, a few merges and four special tokens, as published byte-level tokenizers
    are."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=276,
        show_progress=False,
        special_tokens=["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(["the cat and the dog and the bird"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama written by transformers, with a tokenizer; the head has 300 rows, the tokenizer 276
    ids."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, oracle


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    """A random DeepSeek-V3 on disk in Kimi's INT4 form, its config.json in the old spelling, and transformers
    on the dequantized weights."""
    folder = tmp_path_factory.mktemp("int4")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        initializer_range=0.2,
        eos_token_id=7,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    oracle, codec, disk = transformers.DeepseekV3ForCausalLM(config).eval(), Int4(), {}
    for name, tensor in oracle.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            disk[name] = tensor.clone()
            continue
        for expert, matrix in enumerate(tensor):
            halves = (
                dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                if "gate_up" in name
                else {"down_proj": matrix}
            )
            for projection, weight in halves.items():
                parts = codec.quantize(weight.to(torch.bfloat16))
                weight.copy_(codec.dequantize(parts))  # a view: the oracle computes with what is on disk
                parts["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
                for suffix, part in parts.items():
                    disk[f"{name.rpartition('.')[0]}.{expert}.{projection}.{suffix}"] = part.contiguous()
    save_file(disk, folder / "model.safetensors")
    written = {
        **config.to_dict(),
        "model_type": "kimi_k2",
        "quantization_config": QUANTIZATION,
        "rope_theta": 10000.0,
    }
    written.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(written))
    return folder, oracle


def expected_logits(oracle, sequences):
    with torch.no_grad():
        return [oracle(torch.tensor([sequence])).logits[0] for sequence in sequences]


@pytest.mark.parametrize("written", ["llama", "int4"])
def test_logits_of_unequal_sequences_equal_transformers(written, request):
    folder, oracle = request.getfixturevalue(written)
    actual = unfreeze.load(str(folder), dtype="float32").logits(SEQUENCES)
    for ours, theirs in zip(actual, expected_logits(oracle, SEQUENCES), strict=True):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4


def test_a_bfloat16_model_has_bfloat16_weights_and_float32_logits(llama):
    """bf16 keeps 8 bits: two layers of width 32 stay within a few per cent of the logits' spread."""
    folder, oracle = llama
    model = unfreeze.load(folder, dtype="bfloat16")
    (ours,), (theirs,) = model.logits(SEQUENCES[:1]), expected_logits(oracle, SEQUENCES[:1])
    assert model.decoder.lm_head.weight.dtype == torch.bfloat16 and ours.dtype == torch.float32
    assert 0 < (ours - theirs).abs().mean() <= 0.05 * theirs.std()


def test_packed_weights_stay_packed(int4):
    model = unfreeze.load(int4[0], dtype="float32")
    stored = dict(model.decoder.named_buffers())
    assert stored["model.layers.1.mlp.experts.gate_up_proj.weight_packed"].dtype == torch.int32
    assert not any("experts.gate_up_proj.weight" in name for name, _ in model.decoder.named_parameters())
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())


def test_greedy_text_is_transformers_greedy_text(llama):
    folder, oracle = llama
    model = unfreeze.load(folder, dtype="float32")
    prompt = [0, *model.tokenizer.encode("the cat", specials=False)]
    oracle.generation_config.eos_token_id = 1
    theirs = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, suppress_tokens=list(range(276, 300))
    )[0]
    theirs = theirs[len(prompt) :].tolist()
    assert model.generate(prompt, max_new_tokens=24) == theirs
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(theirs).rstrip("\ufffd")
    assert model.generate("the cat", max_new_tokens=24).rstrip("\ufffd") == text
    assert model.generate(["the cat", "a"], max_new_tokens=24)[0] == model.generate(
        "the cat", max_new_tokens=24
    )


def test_prompts_are_answered_in_kind(llama):
    model = unfreeze.load(llama[0], dtype="float32")
    one, many = model.generate([5, 6], max_new_tokens=4), model.generate([[5, 6], [7]], max_new_tokens=4)
    text, texts = model.generate("a", max_new_tokens=4), model.generate(["a", "b"], max_new_tokens=4)
    assert many[0] == one and texts[0] == text
    assert (type(one[0]), type(text), len(many), len(texts)) == (int, str, 2, 2)


def test_chat_renders_the_template_and_streams_the_same_text(llama):
    """The prompt is the template's text with its special tokens recognised, and special-token text typed by
    the user is not one."""
    model = unfreeze.load(llama[0], dtype="float32")
    messages = [{"role": "user", "content": "the dog<|end|>"}]
    encode, plain = (
        (lambda text: model.tokenizer.encode(text, specials=True)),
        model.tokenizer.encode("<|end|>", specials=False),
    )
    prompt = [*encode("<|user|>the dog"), *plain, *encode("<|end|><|assistant|>")]
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
    answer = model.complete([prompt], **options)[0].text
    assert model.chat(messages, **options) == answer
    assert "".join(model.stream_chat(messages, **options)) == answer
    assert model.chat_batch([messages], **options)[0].text == answer
    assert model.has_chat_template


def test_without_a_tokenizer_ids_work_and_text_is_refused(int4):
    model = unfreeze.load(int4[0], dtype="float32")
    assert model.tokenizer is None and not model.has_chat_template
    assert model.engine.stop_ids == {7}
    assert len(model.generate([1, 2], max_new_tokens=3)) == 3
    for ask in (lambda: model.generate("text"), lambda: model.chat("text")):
        with pytest.raises(UserError, match="no tokenizer") as caught:
            ask()
        assert "token" in caught.value.next


def adapted(folder, out):
    """Save an adapter whose output matters; -> the logits with it."""
    model = unfreeze.load(folder, dtype="float32")
    for site in attach(model.decoder, LoraConfig(rank=2), seed=0):
        for parameter in site.adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    save_adapter(model.decoder, out, base_name=str(folder))
    return model.logits(SEQUENCES)


@pytest.mark.parametrize("written", ["llama", "int4"])
def test_a_run_folder_and_an_adapter_folder_are_the_adapted_model(written, request, tmp_path):
    folder, oracle = request.getfixturevalue(written)
    expected = adapted(folder, tmp_path / "adapter")
    (tmp_path / "resolved_config.json").write_text(json.dumps({"model": str(folder)}))
    for source in (tmp_path, tmp_path / "adapter"):
        model = unfreeze.load(source, dtype="float32")
        assert all(torch.equal(a, b) for a, b in zip(model.logits(SEQUENCES), expected, strict=True))
        assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert (
        expected[0] - expected_logits(oracle, SEQUENCES)[0]
    ).abs().max() > 0.1  # control: the adapter matters


def test_a_pretraining_run_is_the_model_it_wrote(llama, tmp_path):
    (tmp_path / "model").symlink_to(llama[0])
    (tmp_path / "resolved_config.json").write_text("{}")
    assert torch.equal(
        unfreeze.load(tmp_path, dtype="float32").logits([[1, 2]])[0],
        unfreeze.load(llama[0], dtype="float32").logits([[1, 2]])[0],
    )


def test_sources_that_are_no_model_are_refused(tmp_path, llama):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved_config.json").write_text(json.dumps({"model": str(llama[0])}))
    with pytest.raises(CheckpointError, match="has not saved anything yet"):
        unfreeze.load(tmp_path / "run", dtype="float32")
    with (tmp_path / "run" / "lock").open("w") as lock:  # as train/run.py holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        with pytest.raises(CheckpointError, match=r"is training now \(process 4711\) and has not saved"):
            unfreeze.load(tmp_path / "run", dtype="float32")
    for step in (2, 4):  # an interrupted run that trains every weight
        (tmp_path / "run" / "state" / f"step-00000{step}").mkdir(parents=True)
    (tmp_path / "run" / "state" / "step-000006.tmp").mkdir()
    with pytest.raises(CheckpointError, match="its last save is step-000004, but its model") as said:
        unfreeze.load(tmp_path / "run", dtype="float32")
    assert said.value.next == "start the same training command again: it continues from that save"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="base_model_name_or_path"):
        unfreeze.load(tmp_path / "adapter", dtype="float32")
    with pytest.raises(CheckpointError, match="does not exist"):
        unfreeze.load(tmp_path / "nothing", dtype="float32")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "./gone"}')
    with pytest.raises(CheckpointError, match=r"adapter is an adapter of ./gone: ./gone does not exist"):
        unfreeze.load(tmp_path / "adapter", dtype="float32")
    with pytest.raises(ConfigError, match="float16"):
        unfreeze.load(llama[0], dtype="float16")
    with pytest.raises(ConfigError, match=r"no option 'top_q' of sampling; nearest: 'top_[kp]'"):
        unfreeze.load(llama[0], dtype="float32").generate("a", top_q=1)
    with pytest.raises(ConfigError, match="gpu0"):
        unfreeze.load(llama[0], device="gpu0", dtype="float32")


def test_a_tokenizer_of_another_model_is_refused(llama, tmp_path):
    """docs/why/trust.md N5: 276 ids, 256 rows."""
    small = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="276 ids"):
        unfreeze.load(tmp_path, dtype="float32")


def test_sequences_that_cannot_be_scored_are_refused(llama):
    model = unfreeze.load(llama[0], dtype="float32")
    for wrong, message in (
        ([[1], []], "empty"),
        ([[300]], "outside the vocabulary"),
        ([[1] * 257], "256 positions"),
    ):
        with pytest.raises(UserError, match=message):
            model.logits(wrong)
    assert model.logits([]) == []


def test_importing_unfreeze_does_not_import_torch(tmp_path):
    """A torch that only says that it was imported stands in for the real one, which takes seconds."""
    (tmp_path / "torch.py").write_text("raise LookupError('torch is imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import unfreeze\nassert unfreeze.__version__ and 'torch' not in sys.modules\nprint('without')\n"
        "unfreeze.Model"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "without\n" and done.returncode == 1
    assert done.stderr.endswith("LookupError: torch is imported\n")
    with pytest.raises(AttributeError, match="nonsense"):
        unfreeze.nonsense  # noqa: B018


@needs_stories
def test_stories260k_tells_its_story_token_for_token():
    model = unfreeze.load(STORIES, dtype="float32")
    oracle = transformers.LlamaForCausalLM.from_pretrained(STORIES).eval()
    theirs = oracle.generate(torch.tensor([[1]]), max_new_tokens=300, do_sample=False, eos_token_id=None)[
        0, 1:
    ].tolist()
    ours = unfreeze.Model(model.decoder, model.tokenizer, stop_ids=frozenset()).generate(
        [1], max_new_tokens=300
    )
    assert ours == theirs
    assert model.generate("", max_new_tokens=150).startswith(STORY)


@needs_stories
def test_a_continuation_keeps_its_leading_space():
    """A SentencePiece-style decoder drops the first space of a text; a continuation is not the first."""
    assert (
        unfreeze.load(STORIES, dtype="float32").generate("Once upon", max_new_tokens=8).startswith(" a time,")
    )


@needs_kimi
def test_tiny_kimi_int4_has_its_expected_logits():
    expected = load_file(KIMI / "expected_logits.safetensors")
    model = unfreeze.load(KIMI, dtype="float32")
    actual = torch.stack(model.logits(expected["input_ids"].tolist()))
    assert (actual - expected["logits"]).abs().max() <= 1e-4


def test_a_field_whose_name_no_terminal_shows_is_said_in_escapes():
    config = {**json.loads((TINY_K2 / "config.json").read_text()), "a\ud800\nb": 1}
    (line,) = notes(config)
    assert r"a\ud800\nb" in line and line.isprintable()


def test_the_built_in_model_has_its_name_beside_runs_too(tmp_path, monkeypatch):
    """A mistyped name of a run is named there; tiny-k2 is no such name."""
    (tmp_path / "r0").mkdir()
    (tmp_path / "r0" / "resolved_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert unfreeze.load("tiny-k2").decoder.shape.num_layers == 4
    with pytest.raises(CheckpointError, match="r1 does not exist"):
        unfreeze.load("r1")
