"""lm-eval's own clients of OpenAI's API, unmodified: whole runs of local tasks beside its own `hf` model."""

import json
import warnings

import pytest
import yaml

import unfreeze
from tests.serve import small
from unfreeze.evaluate import harness
from unfreeze.serve import completions, tokenize

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")  # lm-eval[api]

SPLIT = {"dataset_path": "json", "test_split": "test"}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "e", "."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices[0]}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
}
WORDS = "the sun is a star and two are four 四是二加二 name".split()
ROWS = [
    {
        "question": " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(3 + i % 4)),
        "choices": [f" {WORDS[(i + k) % len(WORDS)]}" for k in range(3)],
        "label": i % 3,
        "answer": WORDS[i % len(WORDS)],
    }
    for i in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    small.write(folder)
    return folder


@pytest.fixture(scope="module")
def running(folder):
    running = small.serve(unfreeze.load(folder, dtype="float32"))
    yield running
    running.close()


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    data = {**SPLIT, "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"own_{name}", **data, **task}))
    return {name: str(folder / f"{name}.yaml") for name in TASKS}


def run(kind, files, /, *, chat=False, **arguments):
    """-> measures by task, and the generated answers."""
    from lm_eval.tasks import TaskManager

    with harness.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = lm_eval.simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=list(files),
            batch_size=1,
            bootstrap_iters=0,
            device="cpu",
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat,
        )
    answers = [each["resps"][0][0] for each in done["samples"].get("own_answer", ())]
    return done["results"], answers


def measures(results):
    fields = {name: value for task in results.values() for name, value in task.items()}
    return {name: value for name, value in fields.items() if name.endswith(",none") and "stderr" not in name}


def test_the_remote_tokenizer_is_the_tokenizer(folder, running, monkeypatch):
    """RemoteTokenizer; the oracle is transformers' tokenizer on the same files."""
    import transformers
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    url = f"{running.url}/v1/completions"
    assert check_remote_tokenizer_support(url)
    remote, theirs = RemoteTokenizer(url), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the sun is a star", "四是二加二。", "a<|im_end|>b", " "):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert remote.encode(text) == ids and remote.decode(ids) == theirs.decode(ids) == text
    assert remote.batch_decode([[65], [66, 67]]) == theirs.batch_decode([[65], [66, 67]])
    assert (remote.eos_token, remote.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert (remote.bos_token, remote.bos_token_id, remote.pad_token) == (None, None, None)
    chat = [{"role": "user", "content": "the sun", "reasoning_content": "", "tool_calls": []}]
    assert remote.apply_chat_template(chat, tools=None) == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    monkeypatch.setattr(tokenize, "TOLD", ())  # control arm
    assert not check_remote_tokenizer_support(url, max_retries=1)


def test_a_run_with_local_completions_is_that_of_the_hf_model(folder, running, files):
    """The tokenizer is found to be the server's."""
    url = f"{running.url}/v1/completions"
    ours, answers = run("local-completions", files.values(), model="small", base_url=url, max_length=512)
    theirs, expected = run("hf", files.values(), pretrained=str(folder), dtype="float32")
    assert answers == expected and len(set(answers)) > 2
    got, wanted = measures(ours), measures(theirs)
    assert got.keys() == wanted.keys() and len(got) == 5
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-5 if "by" in name else 0), name
    assert 0 < wanted["acc,none"] < 1


def test_control_arm_other_log_probabilities_are_another_run(running, files, monkeypatch):
    honest = completions.logprobs_of

    def wrong(ids, values, tops, *rest):
        return honest(ids, [value and value - 0.01 for value in values], [top and [] for top in tops], *rest)

    url, text = f"{running.url}/v1/completions", [files["text"]]
    before, _ = run("local-completions", text, model="small", base_url=url, max_length=512)
    monkeypatch.setattr(completions, "logprobs_of", wrong)
    after, _ = run("local-completions", text, model="small", base_url=url, max_length=512)
    name = "bits_per_byte,none"
    assert measures(after)[name] > measures(before)[name] + 1e-3


def test_a_run_with_local_chat_completions_is_that_of_the_hf_model(folder, running, files):
    url, one = f"{running.url}/v1/chat/completions", [files["answer"]]
    ours, answers = run("local-chat-completions", one, chat=True, model="small", base_url=url)
    theirs, expected = run("hf", one, chat=True, pretrained=str(folder), dtype="float32")
    assert answers == expected and measures(ours) == measures(theirs) and len(set(answers)) > 2
