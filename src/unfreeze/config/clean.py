"""Fields of a recipe of `unfreeze data clean`: a table per family of filters. docs/howto/clean_data.md has
the source of each number.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from unfreeze.config.parse import Files, Frozen


class Data(Frozen):
    """Files that are read."""

    text: str = Field(
        default="",
        description="column with the text; default: text or content, or the turns of a conversation",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="bad rows: stop at the first, or drop and count them"
    )


class Language(Frozen):
    """Languages to keep."""

    enabled: bool = Field(default=True, description="false: skip this family of filters")
    keep: tuple[str, ...] = Field(default=(), description='languages to keep, such as ["zh", "en"]; []: all')
    min_share: float = Field(default=0.5, ge=0, le=1, description="share of letters in the main script")


class Length(Frozen):
    """Length of a document: in characters if it is Chinese, Japanese, Thai, …, else in words."""

    enabled: bool = Field(default=True, description="false: skip this family of filters")
    min_words: int = Field(default=50, ge=0, description="fewest words")
    max_words: int = Field(default=100_000, ge=1, description="most words")
    min_characters: int = Field(default=200, ge=0, description="fewest characters without white space")
    max_characters: int = Field(default=200_000, ge=1, description="most characters without white space")


class Repetition(Frozen):
    """Largest shares of repeated parts."""

    enabled: bool = Field(default=True, description="false: skip this family of filters")
    lines: float = Field(default=0.30, ge=0, le=1, description="share of lines that occurred before")
    line_characters: float = Field(default=0.20, ge=0, le=1, description="characters in such lines")
    paragraphs: float = Field(
        default=0.30, ge=0, le=1, description="share of paragraphs that occurred before"
    )
    paragraph_characters: float = Field(default=0.20, ge=0, le=1, description="characters in such paragraphs")
    top_ngrams: tuple[float, ...] = Field(
        default=(0.20, 0.18, 0.16),
        min_length=3,
        max_length=3,
        description="characters in the most frequent 2-, 3- and 4-gram",
    )
    duplicate_ngrams: tuple[float, ...] = Field(
        default=(0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        min_length=6,
        max_length=6,
        description="characters in 5- to 10-grams that occurred before",
    )


class Quality(Frozen):
    """Counts that running text has."""

    enabled: bool = Field(default=True, description="false: skip this family of filters")
    min_word_length: float = Field(default=3.0, ge=0, description="mean characters of a word, at least")
    max_word_length: float = Field(default=10.0, ge=0, description="mean characters of a word, at most")
    max_symbols_per_word: float = Field(default=0.1, ge=0, description="# and ellipses per word")
    min_words_with_letter: float = Field(default=0.8, ge=0, le=1, description="share of words with a letter")
    min_letters: float = Field(
        default=0.6, ge=0, le=1, description="share of letters among characters, where those are counted"
    )
    min_function_words: int = Field(default=2, ge=0, description="different function words (en, zh)")
    min_line_length: float = Field(
        default=10.0, ge=0, description="mean characters of a line, where characters are counted"
    )
    max_bullet_lines: float = Field(default=0.9, ge=0, le=1, description="share of lines with a bullet")
    max_ellipsis_lines: float = Field(
        default=0.3, ge=0, le=1, description="share of lines that end in an ellipsis"
    )
    min_ended_lines: float = Field(
        default=0.12, ge=0, le=1, description="share of lines that end in punctuation, more than"
    )


class Personal(Frozen):
    """Personal data that has a form: e-mail and IP addresses, phone, card and identity numbers."""

    enabled: bool = Field(default=False, description="true: replace personal data, or drop its documents")
    action: Literal["replace", "drop"] = Field(
        default="replace", description="replace it, or drop the document"
    )


class Contamination(Frozen):
    """N-grams shared with evaluation files."""

    enabled: bool = Field(default=True, description="false: skip this family of filters")
    against: Files = Field(default=(), description="files of evaluation rows; every text in them counts")
    columns: tuple[str, ...] = Field(default=(), description="columns of those rows to look at; []: all")
    words: int = Field(default=13, ge=1, description="words of an n-gram")
    characters: int = Field(default=20, ge=1, description="characters of an n-gram of Chinese, …")
    least_words: int = Field(
        default=8, ge=1, description="a shorter text than an n-gram counts as a whole from here"
    )
    least_characters: int = Field(default=12, ge=1, description="the same in characters")


class Duplicates(Frozen):
    """Documents that occurred before; the first one stays."""

    exact: bool = Field(default=True, description="drop a document with the same text as one before")
    near: bool = Field(default=True, description="drop a document of similar text (MinHash)")
    threshold: float = Field(default=0.7, gt=0, le=1, description="Jaccard similarity of shingles, at least")
    shingle_words: int = Field(default=5, ge=1, description="words of a shingle")
    shingle_characters: int = Field(default=5, ge=1, description="characters of a shingle of Chinese, …")
    bands: int = Field(
        default=25, ge=1, description="bands of the signature; one equal band makes a candidate"
    )
    rows: int = Field(default=5, ge=1, description="hash values per band")


class Output(Frozen):
    """Form of the written files."""

    compression: Literal["same", "none", "gz", "zst"] = Field(
        default="same", description="same: that of the input if all its files have one"
    )
    shard_bytes: int = Field(
        default=2**28, ge=1, description="uncompressed bytes after which a new file begins"
    )


class Recipe(Frozen):
    """All fields of a recipe. Without a file, every default."""

    data: Data = Data()
    language: Language = Language()
    length: Length = Length()
    repetition: Repetition = Repetition()
    quality: Quality = Quality()
    personal: Personal = Personal()
    contamination: Contamination = Contamination()
    duplicates: Duplicates = Duplicates()
    output: Output = Output()

    @model_validator(mode="after")
    def _ordered(self) -> Recipe:
        for name, low, high in (
            ("words", self.length.min_words, self.length.max_words),
            ("characters", self.length.min_characters, self.length.max_characters),
        ):
            if low > high:
                raise ValueError(f"length.min_{name} = {low} is more than length.max_{name} = {high}")
        return self
