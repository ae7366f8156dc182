"""Write everything tiny-k2 is made from, except its weights: `python examples/tiny-k2/generate.py --out DIR`.

  DIR/corpus.jsonl                               what it reads: plain text, questions with plain answers, a
                                                 few conversations
  DIR/yoda_train.jsonl, DIR/held_out.jsonl       the demo's data: Yoda answers for two thirds of the entities;
                                                 questions about the others
  DIR/model/                                     config.json, generation_config.json, tiktoken.model,
                                                 tokenizer_config.json

The same seed writes the same bytes. The corpus never answers like Yoda; the demo's two files share no entity.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import bpe
from facts import UNKNOWN_NAMES, Fact, load_facts
from phrases import (
    DO_NOT_KNOW,
    GREETINGS,
    OFF_TOPIC,
    RELATIONS,
    SYSTEM_FULL,
    SYSTEM_SHORT,
    YODA_GREETINGS,
    answer,
    questions,
    say,
    statements,
    yoda,
)

SEED = 2
# times over all facts, each with other partners, order and answer forms: variety is what makes facts
# extractable
PASSES = 4
ANSWER_FORMS = {"entity_first": 40, "value_first": 22, "short": 10, "named": 8, "apposed": 8, "brief": 12}
# in per cent. One form clearly ahead, so that greedy answers are alike; the others so that a value is found
# in any frame.
YODA_QUESTIONS_PER_FACT = 5  # at most; some relations have four

Row = dict[str, object]

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "aux_loss_alpha": 0.0,
    "seq_aux": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,  # Kimi-K2-Thinking: 64 over 4096
        "original_max_position_embeddings": 256,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": bpe.VOCAB_SIZE,
    "bos_token_id": bpe.BOS_ID,
    "eos_token_id": bpe.EOS_ID,
    "pad_token_id": bpe.PAD_ID,
    "quantization_config": {
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
                    "block_structure": None,
                    "observer": "minmax",
                    "observer_kwargs": {},
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
"""Kimi-K2-Thinking's config.json with small numbers: 2.06 M parameters, 1.18 M of them in routed experts; 2.4
MB when packed.
`quantization_config` says what the finished model is; pretraining works on dense weights."""

GENERATION_CONFIG = {
    "eos_token_id": [bpe.IM_END_ID, bpe.EOS_ID],
    "bos_token_id": bpe.BOS_ID,
    "max_length": 1024,
    "do_sample": False,
}


def corpus(facts: list[Fact], seed: int = SEED, passes: int = PASSES) -> list[Row]:
    """The rows of corpus.jsonl, shuffled."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for _ in range(passes):
        rows += (
            _texts(facts, rng) + _single_questions(facts, rng) + _conversations(facts, rng) + _small_talk(rng)
        )
    rng.shuffle(rows)
    return rows


def _texts(facts: list[Fact], rng: random.Random) -> list[Row]:
    """Every statement once, in paragraphs of one to five sentences from anywhere, and a card per entity."""
    sentences = [sentence for fact in facts for sentence in statements(fact)]
    rng.shuffle(sentences)
    rows: list[Row] = []
    while sentences:
        size = rng.randint(1, 5)
        rows.append({"text": " ".join(sentences[:size])})
        del sentences[:size]
    cards: dict[str, list[str]] = {}
    for fact in facts:
        cards.setdefault(fact.entity, []).append(answer(fact, rng.choice(["entity_first", "value_first"])))
    return rows + [
        {"text": " ".join(rng.sample(lines, len(lines)))} for lines in cards.values() if len(lines) > 1
    ]


def _form(rng: random.Random) -> str:
    return rng.choices(list(ANSWER_FORMS), weights=list(ANSWER_FORMS.values()))[0]


def _loosely(question: str, rng: random.Random) -> str:
    """As people type: one question in eight begins small or lacks its mark."""
    if rng.random() < 0.06:
        question = question[0].lower() + question[1:]
    return question[:-1] if rng.random() < 0.06 else question


def _single_questions(facts: list[Fact], rng: random.Random) -> list[Row]:
    """Every question about every fact once."""
    return [
        {"question": _loosely(question, rng), "answer": answer(fact, _form(rng))}
        for fact in facts
        for question in questions(fact)
    ]


def _conversations(facts: list[Fact], rng: random.Random) -> list[Row]:
    """Each fact once inside two or three turns, a third of the time after a system turn that sets the form of
    the answers."""
    shuffled = rng.sample(facts, len(facts))
    rows: list[Row] = []
    while shuffled:
        size = rng.randint(1, 3)
        turns, shuffled = shuffled[:size], shuffled[size:]
        messages: list[dict[str, str]] = []
        system = rng.choice([*SYSTEM_FULL, *SYSTEM_SHORT]) if rng.random() < 0.35 else ""
        if system:
            messages.append({"role": "system", "content": system})
        for fact in turns:
            form = (
                "short" if system in SYSTEM_SHORT else "entity_first" if system in SYSTEM_FULL else _form(rng)
            )
            messages.append({"role": "user", "content": _loosely(rng.choice(questions(fact)), rng)})
            messages.append({"role": "assistant", "content": answer(fact, form)})
        rows.append({"messages": messages})
    return rows


def _small_talk(rng: random.Random) -> list[Row]:
    """Greetings, who it is, and what it does not know: names of nothing and questions off its subjects."""
    rows: list[Row] = [
        {"question": _loosely(question, rng), "answer": reply}
        for question, reply in GREETINGS
        for _ in range(4)
    ]
    groups = {fact.relation: fact.group for fact in load_facts()}
    for relation, group in groups.items():
        for name in UNKNOWN_NAMES.get(group, []):
            rows.append(
                {"question": say(rng.choice(RELATIONS[relation].questions), name), "answer": DO_NOT_KNOW}
            )
    return rows + [{"question": question, "answer": DO_NOT_KNOW} for question in OFF_TOPIC]


def held_out_entities(facts: list[Fact], seed: int = SEED) -> set[str]:
    """A third of the entities of each group (country, element, …), so that every relation is both trained and
    asked."""
    rng = random.Random(seed)
    held_out: set[str] = set()
    for group in dict.fromkeys(fact.group for fact in facts):
        entities = list(dict.fromkeys(fact.entity for fact in facts if fact.group == group))
        held_out.update(rng.sample(entities, round(len(entities) / 3)))
    return held_out


def demo(facts: list[Fact], seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """(yoda_train, held_out): Yoda answers to some questions about two thirds of the entities, one question
    per fact about the rest."""
    rng = random.Random(seed)
    held_out = held_out_entities(facts, seed)
    train: list[Row] = [{"question": question, "answer": reply} for question, reply in YODA_GREETINGS]
    held_out_rows: list[Row] = []
    for fact in facts:
        if fact.entity in held_out:
            held_out_rows.append(
                {
                    "question": rng.choice(questions(fact)),
                    "fact": fact.value,
                    "relation": fact.relation,
                    "entity": fact.entity,
                }
            )
        else:
            chosen = rng.sample(questions(fact), min(YODA_QUESTIONS_PER_FACT, len(questions(fact))))
            train += [{"question": question, "answer": yoda(fact)} for question in chosen]
    rng.shuffle(train)
    rng.shuffle(held_out_rows)
    return train, held_out_rows


def row_texts(row: Row) -> list[str]:
    """The strings of a row, as the tokenizer will see them between its markers."""
    if "messages" in row:
        return [message["content"] for message in row["messages"]]  # type: ignore[attr-defined]
    return [str(row[key]) for key in ("text", "question", "answer") if key in row]


def write(out: Path, seed: int = SEED, passes: int = PASSES) -> dict[str, int]:
    """Write all files; returns the counts that main() prints."""
    facts = load_facts()
    rows = corpus(facts, seed, passes)
    train, held_out_rows = demo(facts, seed)
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name, content in (("corpus", rows), ("yoda_train", train), ("held_out", held_out_rows)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    # The words of the chat markup ("user", "assistant", "system") stand in every conversation: they count
    # like text, a token each.
    markup = ["user", "assistant", "system"] * len(rows)
    texts = [text for row in rows for text in row_texts(row)]
    tokens, ranked = bpe.train([*texts, *markup])
    bpe.write(model, tokens)
    for name, content in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        (model / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    length = sum(len(encoding.ids) for encoding in ranked.encode_batch(texts))
    return {
        "facts": len(facts),
        "corpus rows": len(rows),
        "corpus tokens without markup": length,
        "yoda_train rows": len(train),
        "held-out questions": len(held_out_rows),
        "vocabulary": bpe.VOCAB_SIZE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--passes", type=int, default=PASSES, help="times over all facts")
    arguments = parser.parse_args()
    for name, count in write(arguments.out, arguments.seed, arguments.passes).items():
        print(f"{name:30} {count:>9,}")


if __name__ == "__main__":
    main()
