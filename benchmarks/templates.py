"""Render eight kinds of conversation with each chat template of a folder: taught, in how many examples, or
refused and why.

    python benchmarks/templates.py FOLDER_OF_JINJA_FILES [--show NAME] [--write docs/reference/data.md]

--show marks the text that one template teaches with [[ ]]; --write replaces the table in a page, between the
lines that name this script.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from unfreeze.core.errors import DataError
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens.releases import release_of
from unfreeze.data.tokens.templates import ChatTemplate
from unfreeze.data.tokens.turns import Rendered, Renderer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
QUESTION = {"role": "user", "content": "What is 6*7?"}
ANSWER = {"role": "assistant", "content": "It is forty-two."}
MORE = [{"role": "user", "content": "And 7*8?"}, {"role": "assistant", "content": "That makes fifty-six."}]
THOUGHT, SECOND_THOUGHT = "Six sevens are 42.", "Seven eights are 56."
ASKED = {"role": "user", "content": "The weather in Oslo?"}
REPORT = {"role": "assistant", "content": "It snows."}


def call(arguments: object, **fields: str) -> list[dict]:
    """A question, a call without words beside it, its return, and the answer."""
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    ]
    returned = {"role": "tool", "tool_call_id": "call_1", "content": "minus 5 degrees"}
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": calls, **fields}, returned]


ARGUMENTS = {"city": "Oslo", "days": 3}
CASES: dict[str, list[dict]] = {
    "single": [QUESTION, ANSWER],
    "multi-turn": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, *MORE],
    "reasoning": [QUESTION, {**ANSWER, "reasoning_content": THOUGHT}],
    "multi-turn, reasoning": [
        QUESTION,
        {**ANSWER, "reasoning_content": THOUGHT},
        MORE[0],
        {**MORE[1], "reasoning_content": SECOND_THOUGHT},
    ],
    "inline `<think>`": [
        QUESTION,
        {**ANSWER, "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER['content']}"},
    ],
    "tools, string": [*call('{"city": "Oslo", "days": 3}'), REPORT],
    "tools, object": [*call(ARGUMENTS), REPORT],
    "tools, reasoning": [
        *call(ARGUMENTS, reasoning_content="A forecast is needed."),
        {**REPORT, "reasoning_content": "Snow."},
    ],
}
ENDS = (
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "</s>",
    "<turn|>",
    "[e~[",
)


def ends_of(source: str) -> list[str]:
    """The end tokens that the release's generation_config.json names, as far as its template is known."""
    release = release_of(source)
    known = {
        "gpt-oss": ["<|return|>", "<|call|>"],
        "GLM-4.5": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    }
    return known.get(release.name) or [end for end in ENDS if end in source or end == "</s>"]


@functools.cache
def compiled(source: str) -> ChatTemplate:
    """A template with the tokens its release has, as far as they matter here."""
    eos = "<｜end▁of▁sentence｜>" if "｜" in source else "</s>"
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": eos})


def renderer(source: str) -> Renderer:
    return Renderer(compiled(source), ends_of(source), lambda value: value)


def rendered(source: str, case: str) -> Rendered:
    """Raises DataError if the template, or the check, refuses the conversation."""
    tools = [TOOL] if case.startswith("tools") else None
    row = row_from_dict({"messages": CASES[case], "tools": tools}, 1)
    return renderer(source)(row)  # type: ignore[arg-type]


def cell(source: str, case: str) -> str:
    """`taught`, `taught as 2` examples, or `refused:` with the reason."""
    try:
        count = len(rendered(source, case).samples)
        return "taught" if count == 1 else f"taught as {count}"
    except DataError as error:
        for field, what in (
            ("reasoning_content", "reasoning"),
            ("tool_calls", "tool calls"),
            ("content", "the answer"),
        ):
            if f".{field}" in error.message and "is not trained on" in error.message:
                return f"refused: no place for {what}"
        reason = error.message.removeprefix("the chat template refuses these messages: ").partition(
            "; it does so from "
        )[0]
        return f"refused: {reason[:60].rstrip('./')}"


def table(folder: Path) -> str:
    """Markdown: a row per template, a column per case."""
    lines = [f"| template | {' | '.join(CASES)} |", f"|---|{'---|' * len(CASES)}"]
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        lines.append(f"| {path.stem} | {' | '.join(cell(source, case) for case in CASES)} |")
    return "\n".join(lines) + "\n"


def show(source: str) -> None:
    """Print every case as text, with supervised text in [[ ]]."""
    for case in CASES:
        try:
            result = rendered(source, case)
        except DataError as error:
            print(f"\n== {case}: refused\n{error}")
            continue
        print(f"\n== {case}: {len(result.samples)} examples; {'; '.join(result.notes)}")
        for sample in result.samples:
            print(
                "".join(f"[[{segment.text}]]" if segment.supervised else segment.text for segment in sample)
            )
            print("--")


BEGIN, END = (
    "<!-- made by benchmarks/templates.py: begin -->\n",
    "<!-- made by benchmarks/templates.py: end -->\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.show:
        show((options.folder / f"{options.show}.jinja").read_text(encoding="utf-8"))
        return
    text = table(options.folder)
    print(text)
    if options.write:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        options.write.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
