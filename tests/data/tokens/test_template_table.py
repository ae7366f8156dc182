"""Releases' own chat templates (../shared/data/tokens/templates, not kept here): what is taught, held against
transformers' rendering.

The table in docs/reference/data.md is made by benchmarks/templates.py; these tests hold it to the page, and each taught
cell to the oracle.
"""

import functools
import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT.parent / "shared" / "data" / "templates"
spec = importlib.util.spec_from_file_location("templates", ROOT / "benchmarks" / "templates.py")
templates = importlib.util.module_from_spec(spec)
spec.loader.exec_module(templates)

NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not NAMES, reason="the releases' templates are not on this machine")

THINKERS = [
    "kimi_k2_thinking",
    "deepseekv3",
    "deepseek_v31_reduced",
    "qwen3",
    "glm4moe",
    "gptoss",
    "r1_distill_reduced",
    "qwen3_5_think",
]
"""Releases whose reasoning must be taught, not refused."""
K2 = (
    "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot"
    " AI.<|im_end|><|im_user|>user<|im_middle|>What is 6*7?"
)
K2_ASKED = K2 + "<|im_end|><|im_assistant|>assistant<|im_middle|>"


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def texts(name: str, case: str) -> list[tuple[str, ...]]:
    """Each example as alternating texts: given, taught, given, …"""
    samples = templates.rendered(source(name), case).samples
    assert all(segment.supervised == bool(i % 2) for sample in samples for i, segment in enumerate(sample))
    return [tuple(segment.text for segment in sample) for sample in samples]


def spellings(messages: list[dict], release: str) -> list[list[dict]]:
    """The same conversation as a user of transformers may have to spell it: arguments as text or object,
    content null or empty."""
    found = []
    for as_text, null in product((False, True), (None, "")):
        spelled = []
        for message in messages:
            turn = {
                **message,
                **({"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}),
            }
            if turn.get("content") is None:
                turn["content"] = null
            elif (
                "<think>" in turn["content"]
            ):  # templates of thinking releases take it apart, and so does whoever writes the field
                thought, _, said = turn["content"].removeprefix("<think>\n").partition("\n</think>\n\n")
                turn |= {"content": said, "reasoning_content": thought, "thinking": thought}
            if turn.get("tool_calls"):
                function = turn["tool_calls"][0]["function"]
                given = (
                    json.loads(function["arguments"])
                    if isinstance(function["arguments"], str)
                    else function["arguments"]
                )
                arguments = json.dumps(given, ensure_ascii=False) if as_text else given
                id = "functions.get_weather:0" if release.startswith("kimi") else "call_1"
                turn["tool_calls"] = [
                    {"id": id, "type": "function", "function": {**function, "arguments": arguments}}
                ]
            if turn["role"] == "tool" and release.startswith("kimi"):
                turn["tool_call_id"] = "functions.get_weather:0"
            spelled.append(turn)
        found.append(spelled)
    return found


def prompts(name: str, case: str, turn: int) -> set[str]:
    """What transformers gives the model before turn `turn`, in each spelling that its template takes."""
    tools = [templates.TOOL] if case.startswith("tools") else None
    eos = "<｜end▁of▁sentence｜>" if "｜" in source(name) else "</s>"
    made = set()
    for messages in spellings(templates.CASES[case][:turn], name):
        try:
            (text,), _ = render_jinja_template(
                [messages],
                chat_template=source(name),
                tools=tools,
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token=eos,
            )
        except Exception:
            continue
        made.add(text)
    return made


PAGE = (ROOT / "docs" / "reference" / "data.md").read_text(encoding="utf-8")
CELLS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.partition(templates.BEGIN)[2].partition(templates.END)[0].splitlines()[2:]
]
TAUGHT = [
    (name, case)
    for name, *cells in CELLS
    if name in NAMES
    for case, cell in zip(templates.CASES, cells, strict=True)
    if cell.startswith("taught")
]
"""As the page has it: rendering every cell takes seconds, and pytest would wait for them before its first test."""


def test_the_page_holds_the_table_that_the_script_makes():
    assert templates.BEGIN + templates.table(FOLDER) + templates.END in PAGE, (
        "python benchmarks/templates.py FOLDER --write docs/reference/data.md"
    )


def test_reasoning_is_taught_by_every_thinking_release():
    refused = [
        (name, case)
        for name in THINKERS
        for case in ("reasoning", "multi-turn, reasoning", "inline `<think>`")
        if (name, case) not in TAUGHT
    ]
    assert refused == []


@pytest.mark.parametrize("name, case", TAUGHT)
def test_every_prompt_is_that_of_transformers(name, case):
    turns = [i for i, message in enumerate(templates.CASES[case]) if message["role"] == "assistant"]
    examples = texts(name, case)
    if len(examples) > 1:
        given = [example[0] for example in examples]
    else:  # one example of the whole row: what stands before each taught text
        given = ["".join(examples[0][: 2 * i + 1]) for i in range(len(turns))]
    assert len(given) == len(turns)
    for turn, text in zip(turns, given, strict=True):
        assert text in prompts(name, case, turn)


@pytest.mark.parametrize("name, case", TAUGHT)
def test_every_word_of_the_assistant_is_taught_and_no_other(name, case):
    taught = "\n".join(text for example in texts(name, case) for text in example[1::2])
    for message in templates.CASES[case]:
        words = [message.get("content") or "", message.get("reasoning_content", "")]
        words = [
            word
            for text in words
            for word in text.replace("<think>", "\n").replace("</think>", "\n").split("\n")
            if word
        ]
        if message["role"] != "assistant":
            assert not any(word in taught for word in words)
            continue
        words += ["get_weather", "Oslo", "3"] if message.get("tool_calls") else []
        assert all(word in taught for word in words)
        assert "None" not in taught and "null" not in taught


@pytest.mark.parametrize(
    "name, expected",
    [
        ("kimi_k2_thinking", (K2_ASKED, "<think>Six sevens are 42.</think>It is forty-two.<|im_end|>")),
        (
            "deepseekv3",
            (
                "<s><｜User｜>What is 6*7?<｜Assistant｜><think>\n",
                "Six sevens are 42.\n</think>\n\nIt is forty-two.<｜end▁of▁sentence｜>",
            ),
        ),
        (
            "deepseek_v31_reduced",
            (
                "<s><｜User｜>What is 6*7?<｜Assistant｜></think>",
                "<think>Six sevens are 42.</think>It is forty-two.<｜end▁of▁sentence｜>",
            ),
        ),
        (
            "qwen3",
            (
                "<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n",
                "<think>\nSix sevens are 42.\n</think>\n\nIt is forty-two.<|im_end|>",
                "\n",
            ),
        ),
        (
            "glm4moe",
            (
                "[gMASK]<sop><|user|>\nWhat is 6*7?<|assistant|>",
                "\n<think>Six sevens are 42.</think>\nIt is forty-two.<|user|>",
            ),
        ),
    ],
)
def test_reasoning_stands_between_the_releases_marks(name, expected):
    assert texts(name, "reasoning") == [expected]
    assert texts(name, "inline `<think>`") == [expected]
    both = texts(name, "multi-turn, reasoning")
    assert (
        both[0] == expected[:2]
        and templates.SECOND_THOUGHT in both[1][1]
        and templates.THOUGHT not in both[1][0]
    )


def test_an_answer_without_reasoning_closes_the_block_that_the_prompt_opened():
    (_, taught), (prompt, second) = texts("deepseekv3", "multi-turn")
    assert taught == "\n</think>\n\nIt is forty-two.<｜end▁of▁sentence｜>"
    assert prompt.endswith("It is forty-two.<｜end▁of▁sentence｜><｜User｜>And 7*8?<｜Assistant｜><think>\n")
    assert second == "\n</think>\n\nThat makes fifty-six.<｜end▁of▁sentence｜>"


def test_tool_calls_are_written_by_the_template_once():
    (qwen,) = texts("qwen2_5", "tools, string")
    assert (
        qwen[1] == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days":'
        " 3}}\n</tool_call><|im_end|>"
    )
    assert qwen == texts("qwen2_5", "tools, object")[0]
    (kimi,) = texts("kimi_k2_thinking", "tools, string")
    assert "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>" in kimi[1]
    assert "## Return of functions.get_weather:0\nminus 5 degrees" in kimi[2]
    notes = templates.rendered(source("kimi_k2_thinking"), "tools, string").notes
    assert [note for note in notes if "functions.NAME:i" in note and "Kimi-K2-Thinking" in note]
