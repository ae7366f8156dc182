"""The recipe of data clean: its defaults are the published numbers, and the example is a recipe."""

import re
from pathlib import Path

from unfreeze.config.clean import Recipe
from unfreeze.config.names import fields
from unfreeze.config.parse import from_file

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    # Gopher, arXiv 2112.11446, section A.1 and table A1
    "length.min_words": 50,
    "length.max_words": 100_000,
    "quality.min_word_length": 3,
    "quality.max_word_length": 10,
    "quality.max_symbols_per_word": 0.1,
    "quality.min_words_with_letter": 0.8,
    "quality.min_function_words": 2,
    "quality.max_bullet_lines": 0.9,
    "quality.max_ellipsis_lines": 0.3,
    "repetition.lines": 0.3,
    "repetition.line_characters": 0.2,
    "repetition.paragraphs": 0.3,
    "repetition.paragraph_characters": 0.2,
    "repetition.top_ngrams": (0.20, 0.18, 0.16),
    "repetition.duplicate_ngrams": (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
    # FineWeb, arXiv 2406.17557
    "quality.min_ended_lines": 0.12,
    # ChineseWebText, arXiv 2311.01149
    "length.min_characters": 200,
    "quality.min_line_length": 10,
    # GPT-3, arXiv 2005.14165, appendix C
    "contamination.words": 13,
}


def test_the_defaults_are_the_published_numbers():
    recipe, known = Recipe(), fields(Recipe)
    for name, number in PUBLISHED.items():
        table, _, field = known[name].path.rpartition(".")
        assert getattr(getattr(recipe, table), field) == number, name


def test_the_page_has_every_number_and_its_source():
    page = (ROOT / "docs" / "howto" / "clean_data.md").read_text(encoding="utf-8")
    for source in ("2112.11446", "2406.17557", "2311.01149", "2005.14165"):
        assert source in page
    for table in ("language", "length", "repetition", "quality", "personal", "contamination", "duplicates"):
        assert f"`{table}`" in page


def test_the_example_is_a_recipe_and_its_comments_are_defaults(tmp_path):
    text = (ROOT / "examples" / "clean.toml").read_text(encoding="utf-8")
    recipe = from_file(Recipe, ROOT / "examples" / "clean.toml", "")
    assert recipe.language.keep == ("zh", "en") and recipe.personal.enabled
    bare = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(bare)
    every = from_file(Recipe, tmp_path / "all.toml", "")
    data = recipe.data.model_copy(update={"text": "text"})
    contamination = recipe.contamination.model_copy(update={"against": every.contamination.against})
    assert every == recipe.model_copy(update={"data": data, "contamination": contamination})
