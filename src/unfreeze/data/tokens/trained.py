"""Train a byte-level BPE tokenizer with the library `tokenizers`.

BPE: Sennrich et al. 2016 (1508.07909); of bytes: GPT-2. Every byte is a token, so any text is encoded without
loss. A merge joins the most frequent pair of neighbouring tokens, inside a word only (`split_pattern`).
Chinese has no spaces, so a plain split makes words as long as sentences. Almost all of them are distinct, and
each merge visits them (huggingface/tokenizers #1395, #422). Training therefore cuts runs of letters without
spaces every RUN_TRAINED characters. Encoding takes whole runs, because a word that lies across a cut would
not be joined: that cost 5 % more tokens (8.4 MB of Chinese Markdown with English and code in it, 8,192 ids).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.units import format_bytes, plural
from unfreeze.data.tokens.chatml import BOS, CONTROLS, EOS, MARKS, PAD, ROLES, TEMPLATE, TURN_END, reserved
from unfreeze.data.tokens.corpus import KINDS, Corpus, Kind, kind_of
from unfreeze.data.tokens.tokenizer_json import spelled_bytes

NUM_BYTES = 256
RUN_TRAINED, RUN_ENCODED = 4, 64
"""Longest run of letters of a script without spaces that is one word, in training and in encoding."""
LONGEST_TOKEN = 24
"""Bytes of the longest token: 8 Chinese characters. Longer ones are mostly copies, such as lines of ====."""
TWICE = 2
"""Least number of occurrences of a pair to be merged. The library's default also merges what occurs once."""
ALIGNED = 64
"""GPUs multiply by a vocabulary of a multiple of 64 at full speed; rows beyond the ids are never sampled."""

WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
POLLED = 0.1  # seconds


def split_pattern(run: int) -> str:
    """Return the regular expression (Oniguruma) whose matches are words; `run`: see RUN_TRAINED.

    Each alternative is bounded, so that no word is longer than 64 characters. The first that matches counts:
    letters of scripts without spaces; other letters, after one space or sign; up to three digits; signs,
    after a space and before line breaks; spaces before line breaks; spaces, without the last before a word.
    """
    return "|".join(
        (
            rf"[{WITHOUT_SPACES}]{{1,{run}}}",
            rf"(?: |[^\s\p{{L}}\p{{M}}\p{{N}}])?(?:(?![{WITHOUT_SPACES}])[\p{{L}}\p{{M}}]){{1,32}}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{M}\p{N}]{1,16}[\r\n]{0,4}",
            r"[^\S\r\n]{0,16}[\r\n]{1,8}",
            r"[^\S\r\n]{1,16}(?!\S)",
            r"\s{1,16}",
        )
    )


def pre_tokenizer(run: int) -> Any:
    """Return the split into words, followed by the spelling of bytes as characters.

    "isolated" keeps every character, also those that no alternative matches.
    """
    split = pre_tokenizers.Split(Regex(split_pattern(run)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def specials_of(count: int) -> list[str]:
    """Return all special tokens, with `count` reserved ones, in the order of their ids."""
    return [*CONTROLS, *MARKS, *reserved(count)]


def merges_in(vocab: int, count: int) -> int:
    """Return the number of merges of a vocabulary of `vocab` ids, `count` of them reserved.

    Raises ConfigError if there is no room for the bytes and the special tokens.
    """
    named = len(specials_of(0))
    least = NUM_BYTES + named + count
    if vocab < least:
        room = vocab - NUM_BYTES - named
        raise ConfigError(
            f"vocab {vocab} is too small: {NUM_BYTES} bytes + {named} special tokens + {count} reserved ="
            f" {least}, before any merge",
            next=f"--vocab {aligned_size(max(4 * least, 1024))}"
            + (f", or --reserved 0, which leaves {room} merge{'s' * (room > 1)}" if room > 0 else ""),
        )
    return vocab - least


def aligned_size(size: int) -> int:
    """Return the next multiple of ALIGNED."""
    return -(-size // ALIGNED) * ALIGNED


@dataclass
class KindCount:
    """Held-out documents of one kind, and the tokens that they became."""

    documents: int = 0
    nbytes: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, float]:
        rate = self.nbytes / self.tokens if self.tokens else 0.0
        return {
            "documents": self.documents,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "bytes_per_token": rate,
        }


@dataclass
class TrainedTokenizer:
    """A new tokenizer, still in memory. kinds: held-out documents by kind, without absent ones."""

    backend: tokenizers.Tokenizer
    merges: int
    specials: Sequence[str]
    kinds: dict[Kind, KindCount] = field(default_factory=dict[Kind, KindCount])

    @property
    def sizes(self) -> dict[str, int]:
        """Return base (ids that text can produce), total (all ids), padded (rows that suit a GPU)."""
        base = self.backend.get_vocab_size(with_added_tokens=False)
        return {
            "base": base,
            "total": base + len(self.specials),
            "padded": aligned_size(base + len(self.specials)),
        }

    def files(self, record: Mapping[str, object]) -> dict[str, str]:
        """Return the folder's files, name -> content. record: how it was made, kept as made.json."""
        settings = {
            **ROLES,
            "add_bos_token": True,
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        ids = {text: self.backend.token_to_id(text) for text in CONTROLS}
        generation = {
            "bos_token_id": ids[BOS],
            "eos_token_id": [ids[EOS], ids[TURN_END]],  # an answer ends with either
            "pad_token_id": ids[PAD],
        }
        objects = {
            "tokenizer_config.json": settings,
            "special_tokens_map.json": ROLES,
            "generation_config.json": generation,
            "made.json": record,
        }
        texts = {
            name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in objects.items()
        }
        return {"tokenizer.json": self.backend.to_str(pretty=True) + "\n", **texts}


def train_bpe(
    corpus: Corpus,
    vocab: int,
    count: int,
    *,
    progress: Callable[[Corpus, bool], None] = lambda corpus, read: None,
) -> TrainedTokenizer:
    """Train on a corpus, and measure the held-out documents.

    vocab     ids in all; count: reserved ones among them
    progress  called ten times a second with (corpus, True if all files are read)

    The result depends on the files and the seed only. Raises ConfigError for a vocabulary without room, and
    DataError for a bad row or a corpus that has too few pairs for the vocabulary.
    """
    wanted = merges_in(vocab, count)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer(RUN_TRAINED)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BYTES + wanted,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        min_frequency=TWICE,
        show_progress=False,
    )
    _in_thread(backend, trainer, corpus, progress)
    corpus.refuse_empty()
    merges = backend.get_vocab_size() - NUM_BYTES
    if merges < wanted:
        raise _too_little(corpus, merges, vocab, count)
    specials = specials_of(count)
    for text in specials:
        token = AddedToken(text, special=text not in MARKS, normalized=False)
        backend.add_tokens([token])  # pyright: ignore[reportUnknownMemberType]
    backend.pre_tokenizer = pre_tokenizer(RUN_ENCODED)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    result = TrainedTokenizer(backend, merges, specials)
    result.kinds = count_kinds(backend, corpus.measured())
    return result


def _in_thread(
    backend: tokenizers.Tokenizer,
    trainer: trainers.BpeTrainer,
    corpus: Corpus,
    progress: Callable[[Corpus, bool], None],
) -> None:
    """Train in a second thread, because the library cannot be interrupted and tells nothing of its merges.

    After Ctrl-C it stops at its next text; while it merges it is left to itself, and ends with the process.
    """
    raised: list[BaseException] = []
    reading, stop = threading.Event(), threading.Event()
    reading.set()

    def texts() -> Iterator[str]:
        try:
            for text in corpus.texts():
                if stop.is_set():
                    return
                yield text
        except BaseException as error:  # raised in the caller's thread, as it is
            raised.append(error)
        finally:
            reading.clear()

    def work() -> None:
        try:
            backend.train_from_iterator(texts(), trainer)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="bpe", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            progress(corpus, not reading.is_set())
            thread.join(POLLED)
    except KeyboardInterrupt:
        stop.set()
        raise KeyboardInterrupt("nothing was written; run the same command again") from None
    if raised:
        raise raised[0]


def _too_little(corpus: Corpus, merges: int, vocab: int, count: int) -> DataError:
    """Return the error for a corpus with fewer pairs than merges, with the largest vocabulary that fits."""
    least = vocab - merges_in(vocab, count)
    fits = least + merges
    aligned = fits // ALIGNED * ALIGNED
    documents = plural(corpus.documents, "document")
    return DataError(
        f"vocab {vocab} needs {vocab - least:,} merges; {documents} ({format_bytes(corpus.nbytes)}) give"
        f" {merges:,}: no other pair of tokens occurs twice",
        next=f"--vocab {aligned if aligned >= least else fits}, or more text",
    )


def count_kinds(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> dict[Kind, KindCount]:
    """Encode texts -> kind -> documents, bytes and tokens.

    Bytes are those of the tokens: one can be part of a character, and its decoded text has other bytes.
    """
    sizes = [len(spelled_bytes(backend.id_to_token(id) or "")) for id in range(backend.get_vocab_size())]
    kinds: dict[Kind, KindCount] = {kind: KindCount() for kind in KINDS}
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        of_kind = kinds[kind_of(text)]
        of_kind.documents += 1
        of_kind.nbytes += sum(sizes[id] for id in ids)
        of_kind.tokens += len(ids)
    return {kind: of_kind for kind, of_kind in kinds.items() if of_kind.documents}
