"""Published configs made tiny, equal to transformers; and docs/reference/families.md, which is made here.

python tests/models/test_families_page.py [--only MODEL_TYPE] --write docs/reference/families.md

--only makes the row of one model type, from its cases; the others stay. All of them need the published configs,
which are not in the repository.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import published_cases
import pytest
import torch
from family_cases import CASES, apart, batch_of, difference, ours
from published_cases import FOLDER, built, files, made, refusal

from unfreeze import models
from unfreeze.models.unbuilt import NAMED, missing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- made by tests/models/test_families_page.py -->\n", "<!-- end -->\n"
TOLERANCE = 1e-4
ALONE = {
    "chain_of_experts": "| `chain_of_experts` | of this project: equal to loops in float64"
    " (`tests/models/test_chain.py`) | | | float |"
}
PROVED = {  # model_type -> formats, each by the test of this folder that compares such a model's logits
    "llama": ("FP8", "AWQ", "GPTQ"),
    "qwen3": ("FP8",),
    "qwen3_moe": ("FP8", "AWQ", "GPTQ"),
    "deepseek_v3": ("FP8", "INT4"),
    "deepseek_v32": ("FP8",),
    "deepseek_v4": ("FP8", "MXFP4"),
    "glm_moe_dsa": ("FP8", "NVFP4"),
    "mimo_v2_flash": ("FP8",),
    "kimi_k2": ("INT4",),
    "mixtral": ("AWQ", "GPTQ"),
    "phi3": ("AWQ", "GPTQ"),
    "gpt_oss": ("MXFP4",),
    "nemotron_h": ("NVFP4",),
}


def sample() -> list[str]:
    """One published config of each model_type that is built; the script compares all of them."""
    first: dict[str, str] = {}
    for name in built() if FOLDER.is_dir() else []:
        config = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        first.setdefault(config.get("text_config", config)["model_type"], name)
    return sorted(first.values())


@pytest.mark.parametrize("name", sample())
def test_a_published_shape_equals_transformers(name):
    logits, gradients = apart(*made(name))
    assert logits <= TOLERANCE and gradients <= TOLERANCE


LONG = 5200


@pytest.mark.nightly  # a minute and a half; tests/models/blocks/test_rope.py has the tables' bits in every suite
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Kimi-K2-Instruct", "google--gemma-4-26B-A4B", "Phi-4"])
def test_a_long_document_equals_transformers(name):
    """Angles grow with the position, and errors of frequencies with them: 2e-3 before these were float32."""
    if not FOLDER.is_dir():
        pytest.skip("the published configs are not here")
    reference, case = made(name)
    generator = torch.Generator().manual_seed(3)
    document = torch.randint(0, 90, (LONG,), generator=generator).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([document])).logits[0]
        model = ours(reference, case)
        actual = model.logits(model.hidden(batch_of([document])))
    assert float((actual - expected).abs().max()) <= 2 * TOLERANCE


def test_control_a_field_that_is_not_followed_is_seen(monkeypatch):
    names = [name for name in sample() if name.startswith("Mistral-7B")]
    if not names:
        pytest.skip("the published configs are not here")
    reference, case = made(names[0])
    reference.config.rope_parameters["rope_theta"] = 10.0  # ours is built from it, theirs stands already
    assert apart(reference, case)[0] > 1e-2


def rows(page: str) -> dict[str, str]:
    """model_type -> its row of the first table."""
    return dict(re.findall(r"^\| `([\w-]+)` \|(.*)$", page, flags=re.M))


def test_the_page_has_a_row_for_each_model_type_and_its_cases():
    found = rows(PAGE.read_text(encoding="utf-8"))
    expected = models.FAMILIES.keys() | models.WRAPPERS.keys() | NAMED.keys()
    assert found.keys() >= expected, (
        f"docs/reference/families.md lacks {sorted(expected - found.keys())}:"
        " python tests/models/test_families_page.py --write docs/reference/families.md"
    )
    assert all(ALONE[kind] == f"| `{kind}` |{found[kind]}" for kind in ALONE)
    assert ALONE.keys() == models.ONLY_HERE & models.FAMILIES.keys()
    for name, case in CASES.items():
        assert f" {name}" in found[case.model_type], name
    for name in NAMED:
        assert "is not built" in found[name] or "are not built" in found[name]


def test_every_figure_of_the_page_is_within_the_tolerance():
    figures = re.findall(r"\d\.\de-\d\d", PAGE.read_text(encoding="utf-8"))
    compared = len(models.FAMILIES.keys() - models.ONLY_HERE)
    assert len(figures) >= 2 * compared and all(float(figure) <= TOLERANCE for figure in figures)


def row_of(kind: str) -> str:
    """The row of one family, from its cases alone."""
    figures = {name: difference(name) for name, case in CASES.items() if case.model_type == kind}
    logits, gradients = (max(column) for column in zip(*figures.values(), strict=True))
    formats = ", ".join(("float", *PROVED.get(kind, ())))
    return f"| `{kind}` | {', '.join(figures)} | {logits:.1e} | {gradients:.1e} | {formats} |"


def with_row(text: str, kind: str, row: str) -> str:
    """The first table with this row in its place, by name."""
    head, rule, *others = text.split("\n\n")[0].splitlines()
    built = [line for line in others if line.count(" | ") == 4 and "e-" in line]
    rest = [line for line in others if line not in built]
    kept = [line for line in built if not line.startswith(f"| `{kind}` |")]
    built = sorted([*kept, row], key=lambda line: line.split("`")[1])
    first = [line for line in rest if not line.startswith(f"| `{kind}` |")]
    return "\n".join([head, rule, *built, *first]) + text[len(text.split("\n\n")[0]) :]


def test_a_row_takes_its_place_and_no_other_is_lost():
    text = "| a | b |\n|---|---|\n| `x` | s | 1e-6 | 1e-6 | f |\n| `w` | around | | | |\n\n| published |\n"
    row = "| `b` | s | 2e-6 | 2e-6 | f |"
    lines = with_row(text, "b", row).splitlines()
    assert lines[2:5] == [row, "| `x` | s | 1e-6 | 1e-6 | f |", "| `w` | around | | | |"]
    assert with_row(with_row(text, "b", row), "b", row) == with_row(text, "b", row)
    assert lines[-1] == "| published |"


def table() -> str:
    """The page's tables: families with their worst figures, then published configs."""
    cases, worst = defaultdict(list), defaultdict(lambda: (0.0, 0.0))

    def note(kind: str, name: str, figures: tuple[float, float]) -> None:
        cases[kind].append(name)
        worst[kind] = tuple(map(max, worst[kind], figures))
        print(kind, name, *figures, flush=True)

    for name, case in CASES.items():
        note(case.model_type, name, difference(name))
    for name in built():
        config = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        kind = config.get("text_config", config)["model_type"]
        note(kind, f"{name} (tiny)", apart(*made(name)))
    lines = [
        "| model_type | equal to transformers: shapes | logits | gradients | formats proved |",
        "|---|---|---|---|---|",
    ]
    for kind in sorted(models.FAMILIES):
        if kind in models.ONLY_HERE:
            lines.append(ALONE[kind])
            continue
        own = cases.get(kind) or [f"as `{published_cases.bench().transformers_name(kind)}`"]
        logits, gradients = worst[kind] if kind in cases else worst["deepseek_v3"]
        formats = ", ".join(("float", *PROVED.get(kind, ())))
        lines.append(f"| `{kind}` | {', '.join(own)} | {logits:.1e} | {gradients:.1e} | {formats} |")
    for kind in sorted(models.WRAPPERS):
        lines.append(f"| `{kind}` | around a `text_config`; the rest is carried over untouched | | | |")
    for kind in sorted(NAMED):
        lines.append(f"| `{kind}` | {missing({'model_type': kind})} | | | |")
    lines += ["", "| published config | |", "|---|---|"]
    for file in files():
        why = refusal(json.loads(file.read_text(encoding="utf-8")))
        lines.append(f"| {file.stem} | {why or 'built'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = Path(sys.argv[sys.argv.index("--write") + 1]) if "--write" in sys.argv else None
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    if not only and not FOLDER.is_dir():
        sys.exit(
            f"{FOLDER} is not there: the rows of published configs would be lost\n  next: --only MODEL_TYPE"
        )
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    text = with_row(written, only, row_of(only)) if only else table()
    print(text)
    if page is not None:
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
