"""examples/tiny-k2: the facts, the corpus, the tokenizer against `tiktoken`, the chat template, the demo's
split, and that the package's
assets are what the generator writes. Each guard has its control arm."""

import functools
import json
import random
import re
import sys
from pathlib import Path

import jinja2.sandbox
import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from unfreeze.evaluate.style import bare, contains, facts_kept, split_yoda, style_obeyed, style_scores

REPO = Path(__file__).resolve().parents[2]
EXAMPLE = REPO / "examples" / "tiny-k2"
ASSETS = REPO / "src" / "unfreeze" / "assets" / "tiny-k2"
SHARED = REPO.parent / "shared"
sys.path.insert(0, str(EXAMPLE))

import bpe  # noqa: E402
import facts as tables  # noqa: E402
import phrases  # noqa: E402

import generate  # noqa: E402

FACTS = tables.load_facts()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny-k2")
    generate.write(out)
    return out


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def encoding(model: Path) -> tiktoken.Encoding:
    config = json.loads((model / "tokenizer_config.json").read_text())
    specials = {token["content"]: int(id) for id, token in config["added_tokens_decoder"].items()}
    return tiktoken.Encoding(
        "tiny-k2",
        pat_str=bpe.SPLIT_PATTERN,
        mergeable_ranks=load_tiktoken_bpe(str(model / "tiktoken.model")),
        special_tokens=specials,
    )


# --- facts


def test_facts_are_sane():
    assert 300 <= len(FACTS) <= 400
    assert len({(fact.relation, fact.entity) for fact in FACTS}) == len(FACTS), (
        "a question must have one answer"
    )
    groups = {}
    for fact in FACTS:
        assert (
            fact.entity
            and fact.value
            and fact.entity == fact.entity.strip()
            and fact.value == fact.value.strip()
        )
        assert groups.setdefault(fact.entity, fact.group) == fact.group, f"{fact.entity} means two things"
        assert not re.search(r"[.,!?;:]", fact.entity + fact.value), "punctuation would break the sentences"
        assert not contains(fact.value, bare(fact.entity)), f"the question gives the answer away: {fact}"


def test_values_are_distinct_where_the_relation_is_one_to_one():
    for relation in ("capital", "symbol", "atomic number", "author", "city", "planet", "sides"):
        values = [fact.value for fact in FACTS if fact.relation == relation]
        assert len(set(values)) == len(values), relation


def test_no_entity_name_stands_inside_another():
    names = [bare(entity) for entity in dict.fromkeys(fact.entity for fact in FACTS)]
    assert [(a, b) for a in names for b in names if a != b and contains(b, a)] == []


def test_every_template_makes_a_sentence():
    for fact in FACTS:
        relation = phrases.RELATIONS[fact.relation]
        for form in generate.ANSWER_FORMS:
            assert re.fullmatch(r"[A-Z0-9](?:.*[^ .])?\.", phrases.answer(fact, form)) and contains(
                phrases.answer(fact, form), fact.value
            )
        for question in phrases.questions(fact):
            assert (
                question[-1] in "?."
                and contains(question, bare(fact.entity))
                and not contains(question, fact.value)
            ), question
        assert split_yoda(phrases.yoda(fact))[2] == relation.verb
        assert not re.search(
            r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]|  |the the",
            " ".join([*phrases.questions(fact), *phrases.statements(fact)]),
        )


# --- corpus


def test_generation_is_deterministic(made, tmp_path):
    generate.write(tmp_path)
    names = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert len(names) == 7
    assert all((made / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)
    generate.write(tmp_path, seed=3)
    assert (made / "corpus.jsonl").read_bytes() != (tmp_path / "corpus.jsonl").read_bytes()


def yoda_sentences(texts: list[str]) -> list[str]:
    """Texts with "Hmm" in them, or whose sentences would be Yoda's with "Hmm." behind them."""
    found = [text for text in texts if "hmm" in text.lower()]
    return found + [
        s for text in texts for s in re.findall(r"[^.!?]+\.", text) if style_obeyed(s.strip() + " Hmm.")
    ]


def test_the_corpus_never_speaks_like_yoda(made):
    texts = [text for row in rows(made / "corpus.jsonl") for text in generate.row_texts(row)]
    assert yoda_sentences(texts) == []
    # control arm
    assert yoda_sentences([*texts, "Paris, the capital of France is."]) == [
        "Paris, the capital of France is."
    ]
    assert yoda_sentences(["Hmm, who knows."]) != []  # control arm


def test_every_fact_is_read_in_both_orders_and_asked_in_every_way(made):
    corpus = rows(made / "corpus.jsonl")
    sentences = "\n".join(row["text"] for row in corpus if "text" in row)
    asked = {row["question"].rstrip("?.").lower() for row in corpus if "question" in row}
    for fact in FACTS:
        assert (
            phrases.answer(fact, "entity_first") in sentences
            and phrases.answer(fact, "value_first") in sentences
        )
        assert all(question.rstrip("?.").lower() in asked for question in phrases.questions(fact))


# --- the demo's data


def leaks(train: list[dict], held_out: list[dict]) -> list[str]:
    """Held-out entities, and held-out values that only one fact has, that stand anywhere in the training
    rows."""
    text = "\n".join(f"{row['question']} {row['answer']}".lower() for row in train)
    values = [fact.value for fact in FACTS]
    names = [bare(row["entity"]) for row in held_out] + [
        row["fact"]
        for row in held_out
        if values.count(row["fact"]) == 1 and row["relation"] in ("capital", "currency", "author", "city")
    ]
    return [name for name in dict.fromkeys(names) if contains(text, name.lower())]


def test_held_out_entities_never_occur_in_training(made):
    train, held_out = rows(made / "yoda_train.jsonl"), rows(made / "held_out.jsonl")
    assert leaks(train, held_out) == []
    planted = {"question": f"What is {held_out[0]['entity']}?", "answer": "Known, it is. Hmm."}
    assert leaks([*train, planted], held_out) == [bare(held_out[0]["entity"])]  # control arm


def test_the_demo_covers_every_relation(made):
    train, held_out = rows(made / "yoda_train.jsonl"), rows(made / "held_out.jsonl")
    assert 100 <= len(held_out) <= 120 and all(
        set(row) == {"question", "fact", "relation", "entity"} for row in held_out
    )
    assert {row["relation"] for row in held_out} == set(phrases.RELATIONS)
    trained = {row["question"] for row in train}
    for relation, sentences in phrases.RELATIONS.items():
        entities = [fact.entity for fact in FACTS if fact.relation == relation]
        assert (
            sum(phrases.say(q, entity) in trained for q in sentences.questions for entity in entities) >= 10
        )
    assert all(style_obeyed(row["answer"]) for row in train)


def test_the_probe_reads_the_ideal_answers_rightly(made):
    held_out = rows(made / "held_out.jsonl")
    by_key = {(fact.relation, fact.entity): fact for fact in FACTS}
    asked = [by_key[row["relation"], row["entity"]] for row in held_out]
    assert style_scores([phrases.yoda(fact) for fact in asked], held_out) == {
        "style": 100.0,
        "facts": 100.0,
        "asked": len(asked),
    }
    for form in generate.ANSWER_FORMS:
        assert style_scores([phrases.answer(fact, form) for fact in asked], held_out) == {
            "style": 0.0,
            "facts": 100.0,
            "asked": len(asked),
        }
    # Control arm: each fact answered with the value of the next of its relation.
    wrong = []
    for fact in asked:
        others = [
            other.value for other in FACTS if other.relation == fact.relation and other.value != fact.value
        ]
        wrong.append(phrases.yoda(fact._replace(value=others[0])))
    assert not any(facts_kept(wrong, held_out))


# --- tokenizer


def test_tokenizer_equals_tiktoken(made):
    texts = [text for row in rows(made / "corpus.jsonl") for text in generate.row_texts(row)]
    markup = ["user", "assistant", "system"] * len(rows(made / "corpus.jsonl"))
    tokens, ranked = bpe.train([*texts, *markup])
    oracle = encoding(made / "model")
    assert (made / "model" / "tiktoken.model").read_text() == bpe.tiktoken_lines(tokens)
    rng = random.Random(0)
    alphabet = [
        chr(c)
        for c in [
            *range(32, 127),
            *range(0xA0, 0x180),
            *range(0x400, 0x420),
            *range(0x4E00, 0x4E20),
            0x1F600,
            0x301,
            10,
            13,
            9,
        ]
    ]
    odd = ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(2000)]
    yoda = [row["answer"] for row in rows(made / "yoda_train.jsonl")]
    for text in [*dict.fromkeys(texts), *yoda, *odd, "I'll WE'VE it's\r\n\r\n  x   ", "汉字 and ひらがな"]:
        ids = oracle.encode_ordinary(text)
        assert ids == ranked.encode(text).ids, text
        assert oracle.decode(ids) == text


def test_another_split_pattern_would_be_noticed(made):
    """Control arm: GPT-2's pattern, the usual mistake, lets four digits merge across Kimi's cut after
    three."""
    ranks = load_tiktoken_bpe(str(made / "model" / "tiktoken.model"))
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    other, right = (
        tiktoken.Encoding("other", pat_str=gpt2, mergeable_ranks=ranks, special_tokens={}),
        encoding(made / "model"),
    )
    assert any(
        other.encode_ordinary(f"In {year}.") != right.encode_ordinary(f"In {year}.")
        for year in range(1000, 2100)
    )


def test_ids_are_laid_out_as_in_the_release(made):
    config = json.loads((made / "model" / "config.json").read_text())
    oracle = encoding(made / "model")
    assert config["vocab_size"] == bpe.VOCAB_SIZE == oracle.n_vocab and config["vocab_size"] % 64 == 0
    assert len(load_tiktoken_bpe(str(made / "model" / "tiktoken.model"))) == bpe.NUM_RANKS
    assert oracle.encode("[BOS]", allowed_special="all") == [config["bos_token_id"]]
    generation = json.loads((made / "model" / "generation_config.json").read_text())
    assert oracle.encode("<|im_end|>", allowed_special="all")[0] in generation["eos_token_id"]
    real = SHARED / "data" / "kimi-k2-tokenizer" / "tokenizer_config.json"
    if not real.exists():
        pytest.skip(f"{real} is absent; the layout was checked without the release's own file")
    release = {
        token["content"]: int(id) - 163584
        for id, token in json.loads(real.read_text())["added_tokens_decoder"].items()
    }
    assert all(release[name] == offset for offset, (name, _) in bpe.ADDED_TOKENS.items())


# --- chat template


@functools.cache
def compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def render(messages, template=bpe.CHAT_TEMPLATE, **kwargs):
    return compiled(template).render(messages=messages, **kwargs)


CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is\nthe capital of France?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "functions.find:0", "function": {"name": "find", "arguments": {"of": "France"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "functions.find:0", "content": "Paris"},
    {"role": "assistant", "reasoning_content": "It said Paris.", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "Thank "}, {"type": "text", "text": "you."}]},
    {"role": "assistant", "content": "You are welcome."},
]


def test_template_says_exactly():
    assert (
        render(CHAT, tools=[{"name": "find"}]) == '<|im_system|>tool_declare<|im_middle|>[{"name":'
        ' "find"}]<|im_end|><|im_system|>system<|im_middle|> Be brief.'
        " <|im_end|><|im_user|>user<|im_middle|>What is\nthe capital of"
        ' France?<|im_end|><|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"of":'
        ' "France"}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>##'
        " Return of functions.find:0\nParis<|im_end|><|im_assistant|>assistant<|im_middle|><think>It said"
        " Paris.</think>Paris.<|im_end|><|im_user|>user<|im_middle|>Thank"
        " you.<|im_end|><|im_assistant|>assistant<|im_middle|>You are welcome.<|im_end|>"
    )


def unstable_prefixes(template: str) -> list[int]:
    whole = render(CHAT, template)
    return [n for n in range(1, len(CHAT)) if not whole.startswith(render(CHAT[:n], template))]


def test_template_is_prefix_stable_and_prompts_its_own_answers():
    assert unstable_prefixes(bpe.CHAT_TEMPLATE) == []
    for n, message in enumerate(CHAT):
        if message["role"] == "assistant":
            assert render(CHAT[: n + 1]).startswith(render(CHAT[:n], add_generation_prompt=True))
    forgets = bpe.CHAT_TEMPLATE.replace(
        "message.get('reasoning_content')", "message.get('reasoning_content') and loop.last"
    )
    # control arm: reasoning dropped once it is history
    assert forgets != bpe.CHAT_TEMPLATE and unstable_prefixes(forgets) == [5]


def test_template_refuses_what_it_cannot_say():
    with pytest.raises(jinja2.exceptions.TemplateError, match="role developer"):
        render([{"role": "developer", "content": "x"}])
    with pytest.raises(jinja2.exceptions.TemplateError, match="image"):
        render([{"role": "user", "content": [{"type": "image", "image": "x"}]}])


def test_a_question_and_its_answer_stay_short(made):
    oracle = encoding(made / "model")
    lengths = []
    for row in rows(made / "yoda_train.jsonl"):
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        lengths.append(len(oracle.encode(render(chat), allowed_special="all")))
    assert sum(lengths) / len(lengths) < 36 and max(lengths) < 64


# --- the package's assets


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"]
)
def test_assets_are_what_the_generator_writes(made, name):
    assert (ASSETS / name).read_bytes() == (made / "model" / name).read_bytes(), (
        "run: python examples/tiny-k2/generate.py --out DIR"
    )


@pytest.mark.parametrize("name", ["yoda_train.jsonl", "held_out.jsonl"])
def test_demo_data_is_what_the_generator_writes(made, name):
    assert (ASSETS / name).read_bytes() == (made / name).read_bytes(), (
        "run: python examples/tiny-k2/generate.py --out DIR"
    )
