"""The public model: `unfreeze.load(…)`, then logits, generate, chat.

V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from unfreeze.adapters.read import load_adapter
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.config.adapter import packed_as
from unfreeze.config.template import template_values
from unfreeze.core.errors import ConfigError, UserError, nearest
from unfreeze.core.units import plural
from unfreeze.data.tokens.masks import encode_chat, encode_prompt
from unfreeze.data.tokens.tokenizer import Tokenizer, check_vocab, has_tokenizer, load_tokenizer
from unfreeze.generate.answer import Completion, Piece
from unfreeze.generate.engine import Engine, batch_of, check_tokens
from unfreeze.generate.open import Progress, open_model
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.source import ModelSource
from unfreeze.models import Decoder

log = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Options(TypedDict, total=False):
    """Sampling options; Sampling has the defaults and explains them. `stop` may be one string."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    seeds: Sequence[int] | None


def load_opened(
    opened: ModelSource,
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Model:
    """Load a model that open_source has resolved.

    Its adapter computes as LoRA; one trained through a rounding is rounded by job/opening/load.py.
    """
    try:
        variables = template_values(opened.template_variables)
    except ValueError as error:
        raise ConfigError(
            f"{(opened.adapter or Path(opened.base)).parent}: {error}",
            next="correct data.template_variables in the run's resolved_config.json",
        ) from None
    tokenizer = (
        load_tokenizer(manifest.tokens, template_variables=variables, base=manifest.path)
        if has_tokenizer(manifest.tokens)
        else None
    )
    decoder = open_model(manifest, dtype, device, progress, warn=say, as_stored=True)
    if opened.adapter is not None:
        load_adapter(decoder, opened.adapter)
        if (packed := packed_as(opened.adapter)) is not None and not manifest.is_packed():
            (say or log.warning)(
                f"warning: {opened.adapter} was trained against its base in {packed.format.upper()}, which"
                " here is not packed"
            )
    decoder.eval().requires_grad_(False)
    return Model(decoder, tokenizer, stop_ids=end_ids(manifest, tokenizer), manifest=manifest)


def end_ids(manifest: Manifest, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end generation: the tokenizer's, else eos_token_id of the checkpoint's configs."""
    if tokenizer is not None:
        return tokenizer.eos_ids
    ids = [
        config.get("eos_token_id")
        for config in (manifest.generation_config, manifest.config, manifest.config.get("text_config") or {})
    ]
    return frozenset(
        id for value in ids for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)
    )


class Model:
    """A Decoder with its tokenizer.

    tokenizer: None if the checkpoint has none; then prompts are token ids.
    manifest: the files it came from; `save` takes from them what is not in memory.
    Raises CheckpointError if the tokenizer can produce ids the model has no embedding for.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        stop_ids: frozenset[int] | None = None,
        manifest: Manifest | None = None,
    ):
        self.decoder, self.tokenizer, self.manifest = decoder, tokenizer, manifest
        if tokenizer is not None:
            check_vocab(tokenizer, decoder.shape.vocab_size)
        if stop_ids is None:
            stop_ids = frozenset() if tokenizer is None else tokenizer.eos_ids
        self.engine = Engine(decoder, tokenizer=tokenizer, stop_ids=stop_ids)

    def __repr__(self) -> str:
        shape = self.decoder.shape
        return (
            f"<unfreeze.Model {shape.kind}: {plural(shape.num_layers, 'layer')}, hidden size"
            f" {shape.hidden_size}{shape.expert_words}, on {self.decoder.device}>"
        )

    def save(self, folder: str | Path) -> Path:
        """Write the model as a checkpoint folder, complete or not at all. -> the folder.

        Loaded again, every weight is equal to the bit: a tensor keeps the dtype of the file that it came from
        if that loses nothing, else it has the one in memory. Packed weights, tensors beside the language
        model and the tokenizer's files are those of the checkpoint.
        Raises CheckpointError for a folder that is not empty, and for a model without files or with adapters.
        """
        from unfreeze.generate.saving import save_model

        return save_model(self.decoder, self.manifest, Path(folder).expanduser())

    @property
    def has_chat_template(self) -> bool:
        """True if the checkpoint has its own chat template; otherwise `chat` uses a plain template."""
        return self.tokenizer is not None and self.tokenizer.template is not None

    def warm_up(self) -> None:
        """Generate two tokens, so that the first answer waits for no kernel.

        Compiled loops are loaded and kernels are chosen at their first use: 0.35 s of the first token of
        tiny-k2.
        """
        self.engine.generate([[0]], Sampling(max_new_tokens=2))

    @torch.no_grad()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return logits[i][t], the scores of the token after sequences[i][: t + 1].

        float32 [len, V] per sequence.
        The sequences, of any lengths, are packed into one pass without padding; none sees another. The result
        is on the host. V counts all rows of the head.
        Raises UserError for an empty sequence, an id outside the vocabulary, or more tokens than the model
        has positions.
        """
        sequences = [list(tokens) for tokens in sequences]
        if not sequences:
            return []
        check_tokens(sequences, self.decoder.shape.vocab_size)
        longest, positions = max(map(len, sequences)), self.decoder.shape.max_positions
        if longest > positions:
            raise UserError(
                f"a sequence has {longest} tokens, the model {positions} positions (max_position_embeddings)",
                next="shorten it",
            )
        hidden_TD = self.decoder.hidden(batch_of(sequences, self.decoder.device))
        return list(self.decoder.logits(hidden_TD).cpu().split([len(tokens) for tokens in sequences]))

    @overload
    def generate(self, prompt: str, **options: Unpack[Options]) -> str: ...
    @overload
    def generate(self, prompt: list[str], **options: Unpack[Options]) -> list[str]: ...
    @overload
    def generate(self, prompt: list[int], **options: Unpack[Options]) -> list[int]: ...
    @overload
    def generate(self, prompt: list[list[int]], **options: Unpack[Options]) -> list[list[int]]: ...
    @overload
    def generate(self, prompt: str | list[str], *, n: int, **options: Unpack[Options]) -> list[str]: ...
    @overload
    def generate(
        self, prompt: list[int] | list[list[int]], *, n: int, **options: Unpack[Options]
    ) -> list[list[int]]: ...

    def generate(self, prompt: Any, *, n: int | None = None, **options: Unpack[Options]) -> Any:
        """Return the model's continuation of the prompt, without the prompt.

        A list of prompts, of any lengths, runs as one batch. With n there is a list of n continuations to
        each prompt, those of the first prompt first.
        A text gets a text; BOS is added in front if the tokenizer starts documents with it. Token ids are
        used unchanged and get token ids, including a sampled stop id.
        options: max_new_tokens (256), temperature (0: always the likeliest token), top_k, top_p, stop (a
        string or several), seed, seeds (one for each answer).
        Raises UserError for a text prompt without a tokenizer, and whatever Engine.stream and Sampling raise.
        """
        single, each = _is_one(prompt), 1 if n is None else n
        prompts = [prompt] if single else list(prompt)
        answers = [
            done.text if isinstance(prompts[index // each], str) else done.tokens
            for index, done in enumerate(self.complete(prompts, n=each, **options))
        ]
        return answers[0] if single and n is None else answers

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        n: int = 1,
        experts: bool = False,
        max_rows: int | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Like generate, but return all facts about each answer: a Completion.

        experts: with the experts that were chosen for each token. max_rows: answers sampled at once; None: as
        many as memory allows. Ctrl-C raises Interrupted, a KeyboardInterrupt with the completions so far.
        """
        refuse_text(prompts, "prompts", "complete")
        return self.engine.generate(
            [self._encode(prompt) for prompt in prompts],
            sampling({**options, "n": n}),
            experts=experts,
            max_rows=max_rows,
        )

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        n: int = 1,
        **options: Unpack[Options],
    ) -> Iterator[Piece]:
        """Yield the continuation of a prompt, or of several, token by token as it is sampled.

        piece.row is the number of the answer: prompt · n + answer. Breaking off the loop ends the generation.
        The prompts are checked at once, not at the first token.
        """
        prompts: Any = [prompt] if _is_one(prompt) else prompt
        return self._pieces([self._encode(each) for each in prompts], {**options, "n": n})

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> str:
        """Return the assistant's next turn. Options as in generate.

        messages: [{"role": "user", "content": "…"}, …], or a text, which means one user message. Rendered
        with the checkpoint's chat template (or data.PLAIN_TEMPLATE).
        """
        if cast("dict[str, Any]", options).get("n", 1) != 1:
            raise ConfigError("chat returns one answer, without n", next="chat_batch([messages], n=4)")
        return self.chat_batch([messages], **options)[0].text

    def stream_chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Iterator[str]:
        """Like chat, in pieces of certain text: whole characters, never part of a stop string."""
        return (piece.text for piece in self.stream_chat_pieces(messages, **options) if piece.text)

    def stream_chat_pieces(
        self, messages: str | Sequence[Message], **options: Unpack[Options]
    ) -> Iterator[Piece]:
        """Like stream_chat, token by token; the last piece has the stop reason."""
        return self._pieces([self.encode_chat(messages)], {**options})

    def chat_batch(
        self, conversations: Sequence[str | Sequence[Message]], *, n: int = 1, **options: Unpack[Options]
    ) -> list[Completion]:
        """Return the assistant's next turn for many conversations at once, or n turns for each."""
        refuse_text(conversations, "conversations", "chat_batch")
        prompts = [self.encode_chat(messages) for messages in conversations]
        return self.engine.generate(prompts, sampling({**options, "n": n}))

    def _pieces(self, prompts: list[list[int]], options: Mapping[str, Any]) -> Iterator[Piece]:
        steps = self.engine.stream(prompts, sampling(options))
        return (piece for step in steps for piece in step)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        return encode_prompt(self._tokenizer(), prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the prompt of `chat` as the model sees it: ids up to the start of the assistant's turn."""
        return encode_chat(
            self._tokenizer(),
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
        )

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                "this checkpoint has no tokenizer, so text cannot be read or written; prompts as token ids"
                " work",
                next="model.generate([1, 403, 407]), or copy tokenizer.json into the checkpoint's folder",
            )
        return self.tokenizer


def refuse_text(value: object, name: str, method: str) -> None:
    """Raise ConfigError for a text where a list of them is expected: each letter would be one."""
    if isinstance(value, str):
        raise ConfigError(f"{name} is a text; it must be a list", next=f'{method}(["…"])')


def _is_one(prompt: Any) -> bool:
    """True for one prompt, a text or ids; False for a list of them."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def sampling(options: Mapping[str, Any]) -> Sampling:
    """Build a Sampling from keyword options. Raises ConfigError like Sampling, and for unknown options."""
    known = [field.name for field in fields(Sampling)]
    if unknown := next((name for name in options if name not in known), ""):
        raise ConfigError(
            f"there is no option {unknown!r} of sampling{nearest(unknown, known)}",
            next=f"one of {', '.join(known)}",
        )
    stop, seeds = options.get("stop"), options.get("seeds")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return Sampling(**{**options, "stop": stops, "seeds": None if seeds is None else tuple(seeds)})
