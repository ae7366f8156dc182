"""lm-eval's own `hf` model on the same checkpoint, beside ours: every document of every task, offline."""

import json
import math
import warnings
from types import SimpleNamespace

import peft
import pytest
import tokenizers
import torch
import transformers
import yaml
from tokenizers.processors import TemplateProcessing

import unfreeze
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError, DataError, UserError
from unfreeze.evaluate import harness, harness_model
from unfreeze.evaluate.bootstrap import interval, items_of
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.tasks import Settings
from unfreeze.generate.sampling import Sampling

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "the cat and the dog and the bird saw a red house near the green river at night".split()
SPLIT = {"dataset_path": "json", "test_split": "test"}
CHOICE = {
    "task": "own_choice",
    "output_type": "multiple_choice",
    "fewshot_split": "test",
    "num_fewshot": 1,
    "doc_to_text": "{{question}} ",  # the space belongs to the choice's first token
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ANSWER = {
    "task": "own_answer",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n", "e", "gh", "n"], "max_gen_toks": 10},
    "filter_list": [
        {
            "name": "first-letter",
            "filter": [{"function": "regex", "regex_pattern": "([a-z])"}, {"function": "take_first"}],
        },
        {"name": "whole", "filter": [{"function": "take_first"}]},
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
ROLLING = {
    "task": "own_text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}


def words(count, first=0):
    return " ".join(WORDS[(first * 7 + i * i + 3 * i) % len(WORDS)] for i in range(count))


def written(folder, rows, **tasks):
    """The YAML files of tasks over these rows."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = []
    for name, task in tasks.items():
        config = {**SPLIT, "dataset_kwargs": {"data_files": {"test": str(data)}}, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        files.append(str(folder / f"{name}.yaml"))
    return files


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama of 64 positions whose tokenizer begins texts with BOS, and an adapter of peft's on it."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        show_progress=False,
        special_tokens=["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    settings = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),  # transformers samples ids without a name, too
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = ["q_proj", "down_proj"]
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        tuned = peft.get_peft_model(model, lora)
    tuned.peft_config["default"].base_model_name_or_path = str(folder)
    tuned.save_pretrained(folder / "adapter")
    return folder


ROWS = [
    {
        "question": words(4 + 3 * (i % 6), i),
        "choices": [words(1 + (i + k) % 3, k + i) for k in range(3)],
        "label": i % 3,
        "answer": "abcdefghi"[i % 9],
        "text": words(30 * (i % 3) + 3, i) + " naïve 漢字",
    }
    for i in range(24)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return written(folder, ROWS, choice=CHOICE, answer=ANSWER, text=ROLLING)


def theirs(files, *, chat=False, **arguments):
    """lm-eval's own results with its `hf` model in float32, one document at a time."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with harness.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"dtype": "float32", **arguments},
            tasks=list(files),
            batch_size=1,
            device="cpu",
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat,
        )
    assert found is not None
    answers = [each["resps"][0][0] for each in found["samples"]["own_answer"] if each["filter"] == "whole"]
    return {**found["results"], "answers": answers}


def ours(model, files, settings=None, kept=None):
    """measure of each task -> its value."""
    values = {}
    for task in harness.harness_tasks(files, settings):
        task.check()
        for each in task.score(model, kept or Kept()):
            value = interval(
                items_of([v or 0.0 for v in each.values], each.weights, exponent=each.exponent), draws=100
            ).value
            values[task.name.split("/")[-1].removesuffix(".yaml"), each.measure] = value
    return values


def far(found, expected):
    """Largest relative distance of the perplexities; every other measure must be equal."""
    worst, seen = 0.0, 0
    for (task, measure), value in found.items():
        name = f"own_{task}"
        wanted = expected[name][measure if "," in measure else f"{measure},none"]
        seen += 1
        if "per" in measure:
            worst = max(worst, abs(value / wanted - 1))
        else:
            assert value == wanted, (task, measure, value, wanted)
    assert seen == 7
    return worst


@pytest.fixture(scope="module")
def hf(llama, files):
    return theirs(files, pretrained=str(llama))


def test_every_measure_is_that_of_lm_evals_own_model(llama, files, hf):
    model = unfreeze.load(llama, dtype="float32")
    assert far(ours(model, files), hf) < 1e-6
    assert 0.1 < hf["own_choice"]["acc,none"] < 0.9
    # the texts themselves, too: a metric may forgive much
    lm = harness_model.harness_model(model)
    asked = [SimpleNamespace(args=(row["question"], ANSWER["generation_kwargs"])) for row in ROWS]
    assert lm.generate_until(asked) == hf["answers"] and len(set(hf["answers"])) > 12
    assert min(map(len, hf["answers"])) < 4  # some end at a stop text


def test_no_measure_depends_on_the_batch(llama, files, hf):
    model = unfreeze.load(llama, dtype="float32")
    for batch in (1, 5):
        assert far(ours(model, files, Settings(batch=batch)), hf) < 1e-6


def test_an_adapter_is_scored_as_peft_over_transformers(llama, files, hf):
    expected = theirs(files, pretrained=str(llama), peft=str(llama / "adapter"))
    assert far(ours(unfreeze.load(llama / "adapter", dtype="float32"), files), expected) < 1e-6
    assert expected["own_text"] != hf["own_text"]  # control


def test_chats_are_rendered_as_transformers_renders_them(llama, files):
    model = unfreeze.load(llama, dtype="float32")
    expected = theirs(files, chat=True, pretrained=str(llama))
    assert far(ours(model, files, Settings(chat=True)), expected) < 1e-6
    reading = harness_model.Reading(model.tokenizer)
    auto = transformers.AutoTokenizer.from_pretrained(llama)
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]
    for opens in (True, False):
        wanted = auto.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=opens, continue_final_message=not opens
        )
        assert reading.chat(talk, opens=opens) == wanted


@pytest.mark.parametrize(
    "plant",
    [
        {"prefix": 1},  # a text begins with EOS, though the tokenizer has a BOS
        {"tokens": lambda self, text, specials=None: self.tokenizer.encode(text, specials=True)},  # no BOS
    ],
)
def test_control_arm_another_beginning_is_seen(llama, files, hf, plant, monkeypatch):
    for name, value in plant.items():
        monkeypatch.setattr(harness_model.Reading, name, value)
    model = unfreeze.load(llama, dtype="float32")
    with pytest.raises(AssertionError):
        assert far(ours(model, files), hf) < 1e-6


def test_control_arm_a_cut_on_the_right_is_seen(llama, files, hf, monkeypatch):
    monkeypatch.setattr(
        harness_model, "cut", lambda before, tokens, window: (before[: window + 1 - len(tokens)], tokens)
    )
    with pytest.raises(AssertionError):
        far(ours(unfreeze.load(llama, dtype="float32"), files), hf)


@pytest.mark.nightly  # 15 CPU seconds: the experts in float32 compile kernels of their own
def test_a_packed_model_is_scored_as_its_expanded_form(tmp_path, files):
    """tiny-k2's INT4 experts beside the same weights in float32."""
    from unfreeze import models
    from unfreeze.commands.bisect import expanded
    from unfreeze.generate.model import Model

    packed = unfreeze.load(TINY_K2, dtype="float32")
    config = {k: v for k, v in packed.manifest.config.items() if k != "quantization_config"}
    dense = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    state = expanded(packed.decoder)
    state = {name if name.endswith(("weight", "bias")) else f"{name}.weight": t for name, t in state.items()}
    dense.load_state_dict(state)
    one = ours(packed, files, Settings(limit=6))
    other = ours(Model(dense, packed.tokenizer), files, Settings(limit=6))
    for key, value in one.items():
        assert value == pytest.approx(other[key], rel=1e-5), key


def test_each_log_probability_and_whether_it_is_greedy_are_the_hf_models(llama):
    """Three tokens behind contexts within and beyond the window of 64: the likeliest, and two others that have
    one wrong token, the first or the last. The oracles are lm-eval's model, and transformers' argmax."""
    from lm_eval.models.huggingface import HFLM

    with harness.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf = HFLM(pretrained=str(llama), dtype="float32", batch_size=1, device="cpu")

    @torch.no_grad()
    def likeliest(ids):
        return int(hf.model(torch.tensor([ids])).logits[0, -1].argmax())

    asked, greedy = [], []
    for length in (1, 9, 61, 62, 63, 64, 90, 200):
        before = [0, *((7 * i * i + i + length) % 256 + 5 for i in range(length - 1))]
        seen = before[-62:]  # with three tokens, of which the last is not read, that is a window
        for wrong in ("", "first", "last"):
            tokens = []
            for place in range(3):
                token = likeliest([*seen, *tokens])
                tokens.append((token + 1) % 261 if (wrong, place) in (("first", 0), ("last", 2)) else token)
            asked.append((("", ""), before, tokens))
            greedy.append(not wrong)
    lm = harness_model.harness_model(unfreeze.load(llama, dtype="float32"))
    ours, theirs = lm._loglikelihood_tokens(asked), hf._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [each for _, each in ours] == [each for _, each in theirs] == greedy
    assert [log_p for log_p, _ in ours] == pytest.approx([log_p for log_p, _ in theirs], abs=1e-4)


def test_letters_of_a_choice_share_a_pass_and_results_are_kept(llama, monkeypatch):
    model, kept = unfreeze.load(llama, dtype="float32"), Kept()
    before = model.tokenizer.encode("the cat", specials=False)
    asked = [(before, [token]) for token in (20, 21, 22)]
    alone = [harness_model.scored(model, [each], Kept())[0] for each in asked]
    inputs = []
    real = harness_model.batch_of
    monkeypatch.setattr(
        harness_model, "batch_of", lambda each, device: inputs.extend(each) or real(each, device)
    )
    together = harness_model.scored(model, asked, kept)
    assert inputs == [tuple(before)]
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]
    assert [log_p for log_p, _ in together] == pytest.approx([log_p for log_p, _ in alone], abs=1e-6)
    assert harness_model.scored(model, asked, kept) == together and len(inputs) == 1


def test_drawn_answers_differ_by_repeat_and_are_the_same_again(llama):
    model = unfreeze.load(llama, dtype="float32")
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "until": []}
    asked = [([0, 20, 30], harness_model.sampling_of(options, "<|end|>", 256, time)[0]) for time in (0, 1, 2)]
    first = harness_model.continued(model, asked, Kept())
    assert len({tuple(tokens) for tokens in first}) > 1
    assert harness_model.continued(model, asked[::-1], Kept(), most=1) == first[::-1]
    greedy = harness_model.sampling_of({"temperature": 0.0}, "<|end|>", 256, 1)
    assert greedy == (Sampling(max_new_tokens=256, stop=("<|end|>",), seed=0), ["<|end|>"])


def test_a_measure_of_all_documents_together_says_so():
    import lm_eval.api.metrics as metrics

    one = harness.Measure("bleu")
    one.add("t", {0: ("the cat saw a dog", "the cat saw a dog")}, metrics.bleu, better=True)
    scores = one.scores(parts=False)
    assert scores.values == [pytest.approx(100.0)] and "no interval" in scores.notes[0]
    empty = harness.Measure("bits_per_byte")
    empty.add("t", {0: (-3.0, 0), 1: (-2 * math.log(2), 2)}, metrics.bits_per_byte, better=False)
    assert empty.items == ["t: document 1"] and empty.values == [pytest.approx(1.0)]


def test_what_is_not_there_is_one_clear_answer(tmp_path, files, llama, monkeypatch):
    class Catalogue:
        all_tasks = ("hellaswag", "gsm8k")

        def load(self, names):
            raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    local = harness._manager
    monkeypatch.setattr(harness, "_manager", lambda all_of: Catalogue() if all_of else local(False))
    for name, error, text in (
        ("hellaswagg", ConfigError, "nearest: .hellaswag"),
        ("hellaswag", DataError, "the Hub cannot be reached"),
        ("gone.yaml", ConfigError, "no file gone.yaml"),
    ):
        with pytest.raises(error, match=text):
            harness.harness_tasks([name])[0].check()
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\ndataset_path: json\noutput_type: nothing\n")
    with pytest.raises(DataError, match=r"broken\.yaml"):
        harness.harness_tasks([str(broken)])[0].check()
    model = unfreeze.load(llama, dtype="float32")
    long = written(tmp_path, [{"question": "a", "answer": "b"}], long={**ANSWER, "generation_kwargs": {}})
    with pytest.raises(UserError, match="256 new tokens"):
        harness.harness_tasks(long)[0].score(model, Kept())
    monkeypatch.setattr(harness_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="lm-eval"):
        harness.harness_tasks(["hellaswag"])


def test_the_digest_is_of_the_documents_and_of_the_task(tmp_path):
    digests = set()
    for folder, rows, task in (
        ("a", [{"text": "a"}], ROLLING),
        ("b", [{"text": "b"}], ROLLING),
        ("c", [{"text": "a"}], {**ROLLING, "doc_to_target": " {{text}}"}),
    ):
        (tmp_path / folder).mkdir()
        (task_of,) = harness.harness_tasks(written(tmp_path / folder, rows, text=task))
        task_of.check()
        digests.add(task_of.digest)
    assert len(digests) == 3


def test_a_packed_model_has_the_log_probabilities_of_its_logits():
    """The small twin of the expanded form: tiny-k2's INT4 experts, by another way through the model."""
    model = unfreeze.load(TINY_K2, dtype="float32")
    asked = [([5, 6, 7, 8], [300, 401]), ([1280, 3], [900])]
    for (before, tokens), (log_p, _) in zip(asked, harness_model.scored(model, asked, Kept()), strict=True):
        (logits_TV,) = model.logits([[*before, *tokens]])
        rows = logits_TV.log_softmax(-1)[len(before) - 1 : -1]
        wanted = sum(rows[i, token].item() for i, token in enumerate(tokens))
        assert log_p == pytest.approx(wanted, abs=1e-4)
