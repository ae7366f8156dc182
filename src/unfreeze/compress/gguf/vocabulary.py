"""The tokenizer of a checkpoint as a GGUF has it.

Two kinds: byte-level BPE ("gpt2": tokens in GPT-2's spelling, merges, the name of the word splitter), and
SentencePiece's ("llama": a score per token, the one with the highest is merged first; Gemma 4 has merges).
Rows of the embedding without a token are filled with unused ones. Source: gguf.md, "Tokenizer".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from unfreeze.compress.gguf.pretokenizers import pre_of
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.data.tokens.tokenizer import Tokenizer, load_tokenizer
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType
SPACE = "\u2581"  # SentencePiece's spelling of a space
VISIBLE = frozenset(
    "<|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>".split()
)
"""Gemma 4's marks of an answer that a reader must see; llama.cpp hides control tokens."""


@dataclass
class Vocabulary:
    """A tokenizer's tables. stops: texts of the tokens that end an answer. remarks: lines for the user."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space: bool | None
    template: str | None
    stops: list[str]
    remarks: list[str] = field(default_factory=list[str])

    def add_to(self, writer: GGUFWriter) -> None:
        """Write everything into a GGUF."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for name, id in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.add_space is not None:
            writer.add_add_space_prefix(self.add_space)
        if self.template is not None:
            writer.add_chat_template(self.template)


def vocabulary_of(folder: Path, rows: int, arch: str, base: Path | None = None) -> Vocabulary:
    """The vocabulary of a checkpoint's folder. rows: of its embedding.

    base: the checkpoint's folder, if the tokenizer's is that of an adapter with tokens of its own.

    Raises ConfigError for a kind of tokenizer that llama.cpp does not have, or splits otherwise.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder.name} has no tokenizer.json, from which a GGUF's vocabulary is written",
            next="copy tokenizer.json and tokenizer_config.json of the model into its folder",
        )
    tokenizer, file = load_tokenizer(folder, base=base), read_object(path, CheckpointError)
    model: Any = file.get("model") or {}
    if model.get("type") != "BPE":
        raise ConfigError(
            f"a tokenizer of kind {model.get('type')} is not written into a GGUF; BPE is",
            next="serve it here: unfreeze serve",
        )
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    pieces = bool(model.get("byte_fallback")) and not _byte_level(file)
    tokens, types = _tokens(backend, file, rows, pieces)
    if arch == "gemma4":
        types = [
            USER_DEFINED if token in VISIBLE else kind for token, kind in zip(tokens, types, strict=True)
        ]
    merges = list(_merges(model))
    pre = "" if pieces else pre_of(backend, file)
    with_specials, without = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    end = tokenizer.eos_id
    remarks = list(_remarks(file, pieces))
    scored = pieces and arch != "gemma4"
    return Vocabulary(
        model="gemma4" if pieces and arch == "gemma4" else "llama" if pieces else "gpt2",
        pre=("gemma4" if arch == "gemma4" else "default") if pieces else pre,
        tokens=tokens,
        types=types,
        scores=_scores(base or folder, tokens, merges) if scored else None,
        merges=None if scored else [" ".join(_spelled(part) for part in pair) for pair in merges],
        ids=_ids(tokenizer, backend, file),
        add_bos=tokenizer.add_bos,
        add_eos=len(with_specials) > len(without) and with_specials[-1] == end,
        add_space=tokens[without[0]].startswith(SPACE) if pieces else None,
        template=tokenizer.template.source if tokenizer.template else None,
        stops=[
            backend.id_to_token(id) or "" for id in sorted(tokenizer.eos_ids) if id < tokenizer.named_size
        ],
        remarks=remarks,
    )


def _byte_level(file: Mapping[str, Any]) -> bool:
    """True if the tokens are spelled as GPT-2 spells bytes."""
    pre = file.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    return any(step.get("type") == "ByteLevel" for step in steps)


def _tokens(
    backend: tokenizers.Tokenizer, file: Mapping[str, Any], rows: int, pieces: bool
) -> tuple[list[str], list[int]]:
    """Each row's token and its type."""
    added = backend.get_added_tokens_decoder()
    texts = {id: text for text, id in backend.get_vocab(with_added_tokens=True).items()}
    if texts and max(texts) >= rows:
        raise ConfigError(
            f"the tokenizer has ids up to {max(texts)}, the embedding has {rows} rows",
            next="use the tokenizer that was published with this model",
        )
    unknown = file["model"].get("unk_token")
    tokens, types = [f"[PAD{id}]" for id in range(rows)], [UNUSED] * rows
    for id, text in texts.items():
        tokens[id] = text
        if id in added and text != unknown:
            types[id] = CONTROL if added[id].special or _looks_special(text) else USER_DEFINED
            if types[id] == USER_DEFINED:
                tokens[id] = text.replace(SPACE, " ")
        elif text == unknown and pieces:
            types[id] = UNKNOWN
        elif pieces and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[id] = BYTE
        else:
            types[id] = NORMAL
    return tokens, types


def _looks_special(text: str) -> bool:
    """Tokens that llama.cpp's converter takes for control tokens, whatever their flag says."""
    ends = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    named = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    return named or any(text.startswith(begin) and text.endswith(end) for begin, end in ends)


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs, in either spelling of tokenizer.json."""
    for merge in model.get("merges") or []:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _spelled(part: str) -> str:
    """A part of a merge: a space inside would separate the two, so it is spelled as the byte level does."""
    return part.replace(" ", chr(ord(" ") + 256))


def _scores(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    """SentencePiece's scores: those of tokenizer.model if it is there, else minus the rank of the merge.

    llama.cpp merges the pair whose token has the highest score, tokenizers the pair that is listed first. A
    token that no merge makes gets the lowest score.
    """
    lowest = -float(len(merges) + 1)
    scores = [lowest] * len(tokens)
    rank: dict[str, int] = {}
    for number, (first, second) in enumerate(merges):
        rank.setdefault(first + second, number)
    published = folder / "tokenizer.model"
    own = dict(sentencepieces(published.read_bytes())) if published.is_file() else {}
    for id, token in enumerate(tokens):
        if token in rank:
            scores[id] = -float(rank[token])
        if token in own:
            scores[id] = own[token]
    return scores


def sentencepieces(content: bytes) -> Iterator[tuple[str, float]]:
    """(piece, score) of a SentencePiece model, a protocol buffer: field 1 is repeated {1: piece, 2: score}.

    Source: sentencepiece_model.proto.
    """
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            piece, score = "", 0.0
            for inner, part in _fields(value):
                if inner == 1 and isinstance(part, bytes):
                    piece = part.decode("utf-8", "replace")
                if inner == 2 and isinstance(part, bytes):
                    score = struct.unpack("<f", part)[0]
            yield piece, score


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of each field of a protocol buffer's message."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(content, at)
        else:
            size = {1: 8, 5: 4}.get(kind, 0)
        if (not size and kind not in (1, 2, 5)) or at + size > len(content):
            raise CheckpointError("tokenizer.model is not a SentencePiece model", next="remove it")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < 64:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise CheckpointError("tokenizer.model is not a SentencePiece model", next="remove it")


def _ids(tokenizer: Tokenizer, backend: tokenizers.Tokenizer, file: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens. Further ends of an answer are llama.cpp's eot and eom."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    roles = {"unknown": "unk_token", "padding": "pad_token"}
    for name, role in roles.items():
        text = tokenizer.variables.get(role)
        ids[name] = backend.token_to_id(text) if isinstance(text, str) else None
    unknown = file["model"].get("unk_token")
    if ids["unknown"] is None and isinstance(unknown, str):
        ids["unknown"] = backend.token_to_id(unknown)
    further = sorted(tokenizer.eos_ids - {tokenizer.eos_id})
    ids |= dict(zip(("eot", "eom"), further, strict=False))
    return {name: id for name, id in ids.items() if id is not None}


def _remarks(file: Mapping[str, Any], pieces: bool) -> Iterator[str]:
    normalizer = file.get("normalizer") or {}
    if not pieces and normalizer.get("type") == "NFC":
        yield "llama.cpp does not compose characters (NFC): decomposed text gets other tokens than here"
