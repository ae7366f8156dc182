"""`unfreeze distill --prepare` with a server as teacher: its store is the one that the same model in memory gives,
training reads it without the server, and what breaks off is asked for once."""

from __future__ import annotations

import json
import shutil
from functools import partial

import numpy as np
import pytest
from servers import Completions, say

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.teach.coding import Coding
from unfreeze.teach.endpoint import TOGETHER
from unfreeze.teach.store import StoreParts

ROWS = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(TOGETHER + 3)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def distill(capsys, rows, tmp_path, monkeypatch, waits):
    from unfreeze.teach import client

    monkeypatch.setattr(client, "Client", partial(client.Client, tries=2))

    def run(teacher, *arguments, code=0):
        given = [
            "--model",
            TINY_K2,
            "--teacher",
            teacher,
            "--data",
            rows,
            "--out",
            tmp_path / "run",
            *arguments,
        ]
        assert cli.main(list(map(str, ["distill", "--json", *given]))) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out.splitlines()[-1])

    return run


def first_loss(run):
    lines = (run / "events.jsonl").read_text().splitlines()
    return next(json.loads(line)["loss"] for line in lines if '"kind": "train"' in line)


TRAIN = [
    "--dtype",
    "float32",
    "--steps",
    1,
    "--watch.samples",
    0,
    "--tokens-per-step",
    512,
    "--lora.rank",
    2,
    "--optimizer.warmup",
    0,
]


@pytest.mark.parametrize(
    "kind, arguments, limit",
    [
        pytest.param(
            "vllm",
            ["--distillation.top-k", 1536, "--distillation.coding", "float32"],
            2e-5,
            marks=pytest.mark.nightly,
        ),
        ("sglang", ["--distillation.top-k", 64, "--distillation.coding", "float32"], 2e-3),
        pytest.param("strict", ["--distillation.top-k", 8], 2e-2, marks=pytest.mark.nightly),
    ],
)
def test_a_student_that_is_the_served_model_has_nothing_to_learn(
    distill, completions, rows, tmp_path, kind, arguments, limit
):
    """KL of the student's own words through server and store: 0 but for what the few words and the coding leave
    out. A store of another model's words is far from that."""
    server = completions(kind)
    rows.write_text("".join(rows.read_text().splitlines(True)[:3]))
    result = distill(server.url, "--prepare", tmp_path / "said", *arguments)
    assert result["asked"] == result["documents"] == 3
    count = len(server.asked)
    server.close()
    distill(tmp_path / "said", *TRAIN)
    assert abs(first_loss(tmp_path / "run")) < limit and len(server.asked) == count


def test_the_store_is_the_one_of_the_same_teacher_in_memory(distill, completions, tmp_path, monkeypatch):
    options = ["--distillation.top-k", 12, "--distillation.coding", "float32", "--dtype", "float32"]
    distill(completions().url, "--prepare", tmp_path / "served", *options)
    # the model itself is refused as its teacher, by its path and by its bytes
    monkeypatch.setattr("unfreeze.teach.teacher.same_weights", lambda teacher, student: False)
    shutil.copytree(TINY_K2, tmp_path / "tiny")
    distill(tmp_path / "tiny", "--prepare", tmp_path / "asked", *options)
    coding = Coding("float32", 12, 1536)
    stores = [StoreParts(tmp_path / name, coding) for name in ("served", "asked")]
    assert stores[0].places.keys() == stores[1].places.keys() and len(stores[0].places) == len(ROWS)
    for key in stores[0].places:
        (ids, log_q, rest), (own_ids, own_log_q, own_rest) = (coding.decode(s.rows(key)) for s in stores)
        assert log_q == pytest.approx(own_log_q, abs=1e-4)
        # four units in the last place of a logit between 16 and 32, times masses that sum to at most 1
        assert np.exp(rest) == pytest.approx(np.exp(own_rest), abs=4 * 2**-19)
        assert (ids == own_ids).mean() > 0.98  # two words may be as likely


def test_words_that_share_their_text_are_said(tiny, completions, tmp_path, monkeypatch):
    """As of Llama 2's tokenizer, of which \u2581the and the are the same text; none is said of whole words."""
    from unfreeze.config.endpoint import EndpointConfig
    from unfreeze.data import Example
    from unfreeze.teach.client import Client
    from unfreeze.teach.endpoint import Endpoint
    from unfreeze.teach.served import Asking
    from unfreeze.teach.store import StoreWriter

    tokens = tiny.tokenizer.encode("Paris, the capital of France is.", specials=True)
    coding, whole = Coding("compact", 4, 1536), Endpoint._ids.func
    for name, known, warns in (
        ("whole", whole, False),
        ("shared", lambda self: {text: (*ids, 0) for text, ids in whole(self).items()}, True),
    ):
        monkeypatch.setattr(Endpoint, "_ids", property(known))
        lines, folder = [], tmp_path / name
        document = [Example(tokens, [0.0, *[1.0] * (len(tokens) - 1)], 1)]
        asking = Asking(completions("sglang").url, EndpointConfig(), folder, coding, document, lines.append)
        asking.client = Client(asking.client.url, tries=1)
        asking.into(StoreWriter(folder, {}, coding), tiny.tokenizer)
        assert bool([line for line in lines if "100% of the words" in line]) == warns, lines


def test_broken_off_it_goes_on_and_no_document_is_asked_twice(distill, tiny, serving, tmp_path):
    vllm, fails = Completions(tiny), {"from": 1}

    def breaking(server, connection, body):
        if len(server.asked) > fails["from"]:
            return say(connection, 503, {"error": {"message": "restarting"}})
        return vllm(server, connection, body)

    server = serving(breaking)
    said = distill(server.url, "--prepare", tmp_path / "said", code=2)
    assert "answers 503: restarting; 2 tries" in said and "continues" in said
    assert "is incomplete" in distill(tmp_path / "said", *TRAIN, code=2)
    fails["from"] = 100
    result = distill(server.url, "--prepare", tmp_path / "said")
    assert result["documents"] == len(ROWS) and result["asked"] == len(ROWS) - TOGETHER
    sent = [tuple(document) for _, _, body in server.asked for document in body["prompt"]]
    first, failed, last = sent[:TOGETHER], sent[TOGETHER:-3], sent[-3:]
    assert not set(first) & set(last) and set(failed) == set(last)
    count = len(server.asked)
    assert distill(server.url, "--prepare", tmp_path / "said")["asked"] == 0 and len(server.asked) == count


def test_documents_before_a_lie_are_kept(distill, completions, tmp_path):
    seen = []

    def third_lies(choice):
        seen.append(choice)
        if len(seen) == 3:
            choice["prompt_logprobs"][2] = None

    server = completions("vllm", third_lies)
    assert "its log-probabilities are None" in distill(server.url, "--prepare", tmp_path / "said", code=2)
    result = distill(server.url, "--prepare", tmp_path / "said")
    assert result["asked"] == len(ROWS) - 2


def test_what_cannot_be_is_refused(distill, tmp_path, completions):
    remote, said = "https://api.example.com/v1", tmp_path / "said"
    assert "add --prepare FOLDER" in distill(remote, code=2)
    assert "its price is unknown" in distill(remote, "--prepare", said, code=2)
    priced = ["--prepare", said, "--endpoint.price-read", 2, "--endpoint.price-written", 8]
    assert "the budget is $0" in distill(remote, *priced, code=2)
    assert "probabilities at temperature 1 only" in distill(remote, *priced, "--temperature", 2, code=2)
    server = completions()
    distill(server.url, "--prepare", said, "--distillation.top-k", 4)
    assert "another top_k" in distill(server.url, "--prepare", said, "--distillation.top-k", 5, code=2)


def test_the_budget_is_kept_over_restarts(distill, completions, tmp_path):
    server = completions()
    priced = [
        "--prepare",
        tmp_path / "said",
        "--endpoint.price-read",
        1000,
        "--endpoint.price-written",
        0,
        "--endpoint.budget-usd",
    ]
    assert "the budget is $0.1" in distill(server.url, *priced, 0.1, code=2) and not server.asked
    distill(server.url, *priced, 50)
    spent = json.loads((tmp_path / "said" / "spent.json").read_text())["usd"]
    read = sum(len(document) for _, _, body in server.asked for document in body["prompt"])
    assert spent == pytest.approx(read / 1000)
