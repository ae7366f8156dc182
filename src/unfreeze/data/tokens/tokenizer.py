"""The tokenizer of a checkpoint folder: text to ids and back, special tokens, chat template.

It is read from tokenizer.json or tiktoken.model, tokenizer_config.json, special_tokens_map.json,
generation_config.json, config.json, chat_template.jinja or chat_template.json. Nothing else in the folder is
read, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, cast

from unfreeze.core.errors import CheckpointError, DataError
from unfreeze.data.tokens.templates import ChatTemplate, plain_template
from unfreeze.data.tokens.tiktoken_bpe import TiktokenBackend
from unfreeze.data.tokens.tokenizer_json import TokenizerJson
from unfreeze.untrusted.json_object import is_list, is_object, read_object

TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""All files read from a checkpoint folder here."""

MAX_VOCAB = 2**24  # a hundred times the largest published vocabulary
PUBLISHED = "use the tokenizer files that were published with this model"


Origin = tuple[Path, datetime | None, Mapping[str, object]]


class StreamDecoder(Protocol):
    """Takes ids, returns text, whole characters only."""

    def push(self, id: int) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True)
class VocabSpec:
    """Vocabulary sizes, with total <= padded.

    base: ids that text can produce; total: ids with a name; padded: rows of the embedding.

    Rows total … padded-1 exist for alignment only; they are never sampled (docs/why/trust.md N5).
    """

    base: int
    total: int
    padded: int


class Tokenizer:
    """A tokenizer, created by `load_tokenizer`.

    vocab_size    ids 0 … vocab_size-1 can be returned by `encode` or passed to `decode`
    bos_id        or None; add_bos: True if a document starts with it
    eos_id        the end-of-text token, which closes a `text` document; or None
    eos_ids       every id that ends generation: eos_id, those of generation_config.json and config.json,
                  and the template's end of turn
    special_ids   control tokens: skipped in decoding, never produced from user text
    template      the checkpoint's chat template, or None (see `chat`)
    origin        arguments of load_tokenizer that create it again in another process, or None
    identity      a hash of everything it depends on, including the library that encodes. Two tokenizers
                  of one identity encode alike as long as their templates show the same time (`told`)
    """

    def __init__(
        self,
        backend: TiktokenBackend | TokenizerJson,
        *,
        variables: Mapping[str, object],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
        template: ChatTemplate | None,
        identity: str = "",
        origin: Origin | None = None,
    ):
        self._backend = backend
        self.identity, self.origin = identity, origin
        self.vocab_size = backend.vocab_size
        self.named_size = backend.named_size
        self.base_size = backend.base_size
        self.special_ids = backend.special_ids
        self.bos_id, self.eos_id, self.add_bos = bos_id, eos_id, add_bos
        self.variables = dict(variables)
        self.template = template
        self.chat = template or plain_template(variables, add_bos=add_bos and bos_id is not None)
        self.special_texts = tuple(
            sorted((backend.token_text(id) for id in self.special_ids), key=len, reverse=True)
        )
        spelled = [re.escape(text) for text in self.special_texts if text]
        self.special_pattern = re.compile("|".join(spelled)) if spelled else None  # longest first
        self.eos_ids = eos_ids
        if (turn_end := self._turn_end()) is not None:
            self.eos_ids = eos_ids | {turn_end}

    def told(self) -> str | None:
        """Date texts of the chat template; None if they may change before the day ends."""
        return self.chat.told()

    def encode(self, text: str, *, specials: bool, continues: bool = False) -> list[int]:
        """Return the ids of `text`; BOS is never added here.

        specials   the text of a special token (`<|im_end|>`) becomes that token: True for rendered
                   templates, False for user text
        continues  other text precedes this one, so no leading space is added (matters for
                   SentencePiece-style
                   tokenizers)
        """
        if isinstance(self._backend, TokenizerJson):
            return self._backend.encode(text, specials=specials, continues=continues)
        return self._backend.encode(text, specials=specials)

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        wrong = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            raise DataError(f"token id {wrong} is outside the tokenizer's {self.vocab_size} ids")
        return self._backend.decode(ids, skip_specials=skip_specials)

    def stream_decoder(self, *, skip_specials: bool = True) -> StreamDecoder:
        """Return a decoder for ids that arrive one by one.

        `push(id)` returns the text that became certain, never part of a character; `finish()` returns what is
        left at the end.
        """
        return self._backend.stream(skip_specials=skip_specials)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token given as text, or None."""
        return self._backend.token_id(text)

    def token_text(self, id: int) -> str:
        """Return the token's own spelling; the text itself for special tokens."""
        return self._backend.token_text(id)

    def bytes_of(self, id: int) -> bytes | None:
        """Return the bytes of a token; None if the vocabulary is not one of bytes.

        Of a special token they are those of its text. Bytes per token are counted with these, because a token
        can be part of a character.
        """
        return self._backend.bytes_of(id)

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that a token adds to a text: bytes_of, but none for a special token."""
        return b"" if id in self.special_ids else self._backend.bytes_of(id)

    def as_json(self) -> str | None:
        """Return the content of tokenizer.json with the tokens that other files add; None without one."""
        return self._backend.as_json() if isinstance(self._backend, TokenizerJson) else None

    def _turn_end(self) -> int | None:
        """Return the special token with which the template closes an assistant's turn, or None.

        BOS, which some templates write before every turn, does not count unless it is also the end token.
        """
        content = "Zq7"  # cannot be part of a template
        try:
            text = self.chat.render(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            )
        except DataError:  # the template refuses this plain conversation; each row is checked later
            return None
        tail = text.rpartition(content)[2]
        return (
            next(
                (
                    id
                    for id in self.encode(tail, specials=True, continues=True)
                    if id in self.special_ids and (id != self.bos_id or id in self.eos_ids)
                ),
                None,
            )
            if tail
            else None
        )


def has_tokenizer(model_dir: str | Path) -> bool:
    """Return True if the folder has a tokenizer that can be read."""
    return any((Path(model_dir) / name).is_file() for name in ("tokenizer.json", "tiktoken.model"))


def load_tokenizer(
    model_dir: str | Path,
    *,
    now: datetime | None = None,
    template_variables: Mapping[str, object] | None = None,
    base: Path | None = None,
) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    `now` and `template_variables` are the chat template's (see ChatTemplate).
    `base`: folder of config.json and generation_config.json, if not the same: that of the base of an adapter
    with tokens of its own.
    Raises CheckpointError if there is none, or if its files contradict each other.
    """
    folder = Path(model_dir)
    if not has_tokenizer(folder):
        raise CheckpointError(
            _absent(folder),
            next="copy tokenizer.json (or tiktoken.model) and tokenizer_config.json into the folder",
        )
    # the four files; tokenizer_config.json has precedence over special_tokens_map.json
    settings = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    config = _read_json(folder / "config.json") or _read_json((base or folder) / "config.json")
    generation_file = "generation_config.json"
    generation = _read_json(folder / generation_file) or _read_json((base or folder) / generation_file)
    inner = config.get("text_config")
    text_config = inner if is_object(inner) else config
    added = _added_tokens(settings)
    if (folder / "tokenizer.json").is_file():
        backend = TokenizerJson(folder / "tokenizer.json", added)
    else:
        backend = TiktokenBackend(folder / "tiktoken.model", added, _vocab_size(text_config))

    # BOS and EOS: texts in the tokenizer's files, else ids in config.json or generation_config.json
    variables = {role: text for role in TOKEN_ROLES if (text := _token_text(settings.get(role)))}
    ids = {role: _id_of(backend, role, text) for role, text in variables.items()}
    config_eos = [
        *_as_ids(text_config, "eos_token_id", "config.json"),
        *_as_ids(config, "eos_token_id", "config.json"),
    ]
    generation_eos = _as_ids(generation, "eos_token_id", "generation_config.json")
    bos_id = ids.get("bos_token", next(iter(_as_ids(text_config, "bos_token_id", "config.json")), None))
    eos_id = ids.get("eos_token", next(iter([*config_eos, *generation_eos]), None))
    for role, id in (("bos_token", bos_id), ("eos_token", eos_id)):
        if id is not None and role not in variables and id < backend.vocab_size:
            variables[role] = backend.token_text(id)
    # does a document start with BOS? As the settings say, else as tokenizer.json itself adds it
    explicit = settings.get("add_bos_token")
    add_bos = bos_id is not None and (explicit if isinstance(explicit, bool) else backend.adds_bos)
    # a turn may end with any end token that the files name (Llama 3.1 has three)
    eos_ids = frozenset(id for id in [eos_id, *config_eos, *generation_eos] if id is not None)
    template = _template(
        folder, settings, {**variables, **_additional(settings), **(template_variables or {})}
    )
    if template is not None:
        template.now = now
    return Tokenizer(
        backend,
        variables=variables,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=eos_ids,
        add_bos=add_bos,
        template=template,
        identity=_identity(folder, backend.library, template_variables or {}),
        origin=(folder.resolve(), now, template_variables or {}),
    )


def _identity(folder: Path, library: str, variables: Mapping[str, object]) -> str:
    """Return Tokenizer.identity: a hash of every file read, the variables and the library's version."""
    digest = hashlib.blake2b(repr((sorted(variables.items()), library)).encode(), digest_size=16)
    for name in FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {len(content)}".encode() + content)
    return digest.hexdigest()


def check_vocab(tokenizer: Tokenizer, vocab_size: int, rows: Mapping[str, int] | None = None) -> VocabSpec:
    """Return the one vocabulary that tokenizer, config.json and weights agree on.

        vocab_size  config.json's
        rows        first dimension of each tensor with a row per id (embedding, head), by name

    Raises CheckpointError (docs/why/trust.md N5) if a tensor's number of rows differs from config.json, if
    the tokenizer can produce an id without an embedding, or if no end token of the checkpoint is one of the
    tokenizer's ids. More rows than ids is padding, which is fine.
    """
    other = next(((name, count) for name, count in (rows or {}).items() if count != vocab_size), None)
    if other is not None:
        raise CheckpointError(
            f"config.json has vocab_size {vocab_size}, {other[0]} has {other[1]} rows, the tokenizer"
            f" {tokenizer.named_size} ids",
            next=f"use the config.json that was published with these weights (vocab_size {other[1]})",
        )
    if tokenizer.named_size > vocab_size:
        last = tokenizer.named_size - 1
        raise CheckpointError(
            f"the tokenizer has {tokenizer.named_size} ids (last: {last} {tokenizer.token_text(last)!r}),"
            f" config.json has vocab_size {vocab_size}: {tokenizer.named_size - vocab_size} ids have no"
            " embedding",
            next="use the tokenizer files that were published with this model",
        )
    if tokenizer.eos_ids and min(tokenizer.eos_ids) >= tokenizer.named_size:
        raise CheckpointError(
            f"the end tokens {sorted(tokenizer.eos_ids)} (config.json, generation_config.json) are not among"
            f" the tokenizer's {tokenizer.named_size} ids: an answer would never end",
            next="use the tokenizer files that were published with this model",
        )
    return VocabSpec(tokenizer.base_size, tokenizer.named_size, vocab_size)


def _absent(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder.name} has only tokenizer.model (SentencePiece), which is unsupported; transformers can"
            " write tokenizer.json from it"
        )
    return f"{folder.name} has no tokenizer: neither tokenizer.json nor tiktoken.model"


def _read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    return read_object(path, CheckpointError, next=PUBLISHED)


def _added_tokens(settings: Mapping[str, object]) -> dict[int, tuple[str, bool]]:
    """Return added_tokens_decoder as id -> (text, special)."""
    table: Any = settings.get("added_tokens_decoder") or {}  # any type; checked below
    try:
        added = {
            int(id): (str(entry["content"]), bool(entry.get("special", False))) for id, entry in table.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            "tokenizer_config.json: added_tokens_decoder is not a table id -> {content, special}"
        ) from None
    wrong = next((id for id in added if not 0 <= id < MAX_VOCAB), None)
    if wrong is not None:
        message = (
            f"tokenizer_config.json: added_tokens_decoder has the id {str(wrong)[:40]}; ids are 0 to"
            f" {MAX_VOCAB - 1:,}"
        )
        raise CheckpointError(message, next=PUBLISHED)
    return {id: (_encodable(text), special) for id, (text, special) in added.items()}


def _encodable(text: str) -> str:
    """Return `text` if UTF-8 can encode it.

    JSON can spell half a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"tokenizer_config.json: the token {text[:40]!r} holds half a surrogate pair", next=PUBLISHED
        ) from None
    return text


def _token_text(value: object) -> str | None:
    """Return a special token's text, written as such or as {"content": text, …}."""
    if isinstance(value, Mapping):
        value = cast("Mapping[str, object]", value).get("content")
    return _encodable(value) if isinstance(value, str) and value else None


def _additional(settings: Mapping[str, object]) -> dict[str, object]:
    items: object = settings.get("additional_special_tokens") or list[object]()
    if not is_list(items):
        raise CheckpointError(
            "tokenizer_config.json: additional_special_tokens is not a list", next=PUBLISHED
        )
    texts = [text for item in items if (text := _token_text(item))]
    return {"additional_special_tokens": texts} if texts else {}


def _id_of(backend: TiktokenBackend | TokenizerJson, role: str, text: str) -> int:
    id = backend.token_id(text)
    if id is None:
        raise CheckpointError(f"tokenizer_config.json: {role} {text!r} is not in the vocabulary")
    return id


def _vocab_size(config: Mapping[str, object]) -> int:
    """Return vocab_size of config.json; 0 if absent.

    It has a limit, because each reserved id gets a name.
    """
    value = config.get("vocab_size") or 0
    if type(value) is not int or not 0 <= value <= MAX_VOCAB:
        raise CheckpointError(
            f"config.json: vocab_size is {str(value)[:60]}; it must be a whole number up to {MAX_VOCAB:,}",
            next=PUBLISHED,
        )
    return value


def _as_ids(config: Mapping[str, object], field: str, file: str) -> list[int]:
    """Return an id field that may be absent, null, a number or a list of numbers."""
    value = config.get(field)
    values: list[object] = value if is_list(value) else [] if value is None else [value]
    ids = [id for id in values if isinstance(id, int) and not isinstance(id, bool) and id >= 0]
    if len(ids) < len(values):
        raise CheckpointError(f"{file}: {field} is {value!r}, expected an id or a list of ids")
    return ids


def _template(
    folder: Path, settings: Mapping[str, object], variables: Mapping[str, object]
) -> ChatTemplate | None:
    """Return the chat template, or None.

    It is in chat_template.jinja, else in chat_template.json, else in tokenizer_config.json (a text, or a list
    of named texts).
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source: object = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{file.name} is not UTF-8: byte {error.start + 1}", next=PUBLISHED
            ) from None
    else:
        file = folder / "chat_template.json"
        own = _read_json(file)
        if "chat_template" not in own:
            own, file = settings, folder / "tokenizer_config.json"
        source = own.get("chat_template")
    if source is None:
        return None
    if is_list(source) and all(is_object(item) for item in source):
        source = {item.get("name"): item.get("template") for item in source}
    if isinstance(source, str):
        source = {"default": source}
    if not is_object(source) or not isinstance(source.get("default"), str):
        raise CheckpointError(
            "chat_template is neither a text nor a list of named templates with one called 'default'"
        )
    name = f"{file}" if file.suffix == ".jinja" else f"{file}: chat_template"
    return ChatTemplate(source["default"], variables, source.get("tool_use"), name)
