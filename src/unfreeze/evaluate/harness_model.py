"""A model for lm-eval (EleutherAI's Language Model Evaluation Harness), in this process.

    from unfreeze.evaluate.harness_model import harness_model
    lm_eval.simple_evaluate(model=harness_model(unfreeze.load("runs/mine")), tasks=["hellaswag"])

Numbers are those of lm-eval's own `hf` model on the same checkpoint: contexts are tokenized, cut from the
left and begun in the same way, and log p is over the whole head. Sequences of a pass are packed without
padding, so a score depends on the batch by rounding only.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unfreeze.core.errors import CheckpointError, ConfigError, DataError, UserError
from unfreeze.data.tokens.templates import TemplateRefusal
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.rows import needs_tokenizer
from unfreeze.evaluate.tasks import Shown, unseen
from unfreeze.generate.engine import batch_of
from unfreeze.generate.model import Model
from unfreeze.generate.sampling import Sampling
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

TOKENS = 4096  # of one pass; a single longer one runs alone
ROWS = 1024  # positions whose logits are alive at once
NEW_TOKENS = 256  # lm-eval's default
SAMPLED = ("temperature", "top_p", "top_k")
"""Options of a request that Sampling knows by the same name."""

Asked = tuple[list[int], list[int]]
"""(tokens before, tokens to score)."""


def needs_lm_eval() -> None:
    """Raise ConfigError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks of lm-eval need a library that is not installed", next="pip install lm_eval")


@dataclass
class Reading:
    """Texts to tokens, as lm-eval's `hf` model does it.

    prefix  token before a text that has none before it: BOS if the tokenizer's files name one, else EOS
    """

    tokenizer: Tokenizer

    @cached_property
    def prefix(self) -> int:
        tokenizer = self.tokenizer
        first = (tokenizer.bos_id, tokenizer.eos_id) if self._names_bos else (tokenizer.eos_id,)
        token = next((id for id in first if id is not None), tokenizer.bos_id)
        if token is None:
            raise ConfigError("the tokenizer has neither BOS nor EOS, so a text has no beginning")
        return token

    @property
    def _names_bos(self) -> bool:
        """True if the tokenizer's own files name a BOS, not config.json alone."""
        if self.tokenizer.origin is None:
            return True
        folder = Path(self.tokenizer.origin[0])
        files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        return any(read_object(file, CheckpointError).get("bos_token") for file in files if file.is_file())

    def tokens(self, text: str, specials: bool | None = None) -> list[int]:
        """Return the tokens of a text. specials: BOS in front; None: if the tokenizer adds it.

        A text that begins with the prefix's own spelling gets no second one.
        """
        own = self.tokenizer.encode(text, specials=True)
        if specials is None:
            specials = not text.startswith(self.tokenizer.decode([self.prefix], skip_specials=False))
            specials = specials and self.tokenizer.add_bos
        bos = self.tokenizer.bos_id
        return [bos, *own] if specials and bos is not None else own

    def chat(self, messages: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
        """Render messages. opens: to the start of the assistant's turn, else the last message stays open.

        A template that refuses a system message gets the others.
        """
        try:
            return self._rendered([dict(message) for message in messages], opens)
        except TemplateRefusal:
            others = [dict(message) for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            return self._rendered(others, opens)

    def _rendered(self, messages: list[dict[str, Any]], opens: bool) -> str:
        text = self.tokenizer.chat.render(messages, add_generation_prompt=opens)
        if opens or not messages:
            return text
        last = str(messages[-1]["content"])
        for end in (last, last.strip()):
            if end and end in text:
                return text[: text.rindex(end) + len(end)]
        raise DataError("the chat template changes the last message, so it cannot be continued")


def scored(
    model: Model, wanted: Sequence[Asked], kept: Kept, shown: Shown = unseen, *, most: int | None = None
) -> list[tuple[float, bool]]:
    """Return for each (Σ log p of its tokens in nats, True if each of them is the likeliest).

    Requests that differ only in their last token, such as the letters of a choice, share a pass. The last
    token itself is never read. most: sequences of one pass.
    """
    keys = [kept.key("continuation", before, tokens) for before, tokens in wanted]
    by_input: dict[tuple[int, ...], dict[str, int]] = {}
    for i, (key, (before, tokens)) in enumerate(zip(keys, wanted, strict=True)):
        if kept.get(key) is None:
            by_input.setdefault((*before, *tokens)[:-1], {})[key] = i
    done = len(wanted) - sum(len(same) for same in by_input.values())
    for inputs in passes(sorted(by_input, key=len, reverse=True), most):
        questions = [
            (place, key, wanted[i][1]) for place, at in enumerate(inputs) for key, i in by_input[at].items()
        ]
        for key, value in _answered(model, inputs, questions):
            kept.put(key, value)
            done += 1
        shown(done, len(wanted))
    return [(float(log_p), bool(greedy)) for log_p, greedy in map(kept.get, keys)]


def passes(inputs: Sequence[tuple[int, ...]], most: int | None) -> Iterator[list[tuple[int, ...]]]:
    """Yield the inputs that run together, in order: at most TOKENS tokens and `most` sequences."""
    together: list[tuple[int, ...]] = []
    tokens = 0
    for each in inputs:
        if together and (tokens + len(each) > TOKENS or len(together) == most):
            yield together
            together, tokens = [], 0
        together.append(each)
        tokens += len(each)
    if together:
        yield together


@torch.no_grad()
def _answered(
    model: Model, inputs: Sequence[tuple[int, ...]], questions: Sequence[tuple[int, str, list[int]]]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, [Σ log p, greedy]) of each question (place of its input, key, tokens), from one pass."""
    decoder = model.decoder
    batch = batch_of(inputs, decoder.device)
    with decoder.looking():
        hidden_TD = decoder.hidden(batch)
    ends = (batch.starts_S + torch.tensor(batch.lengths())).tolist()
    rows = [row for place, _, tokens in questions for row in range(ends[place] - len(tokens), ends[place])]
    targets = [token for _, _, tokens in questions for token in tokens]
    log_p: list[float] = []
    likeliest: list[bool] = []
    for first in range(0, len(rows), ROWS):
        logits_NV = decoder.logits(hidden_TD[rows[first : first + ROWS]]).float()
        target_N = torch.tensor(targets[first : first + ROWS], device=logits_NV.device)
        chosen_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
        log_p += chosen_N.tolist()
        likeliest += (logits_NV.argmax(-1) == target_N).tolist()
    at = 0
    for _, key, tokens in questions:
        end = at + len(tokens)
        yield key, [sum(log_p[at:end]), all(likeliest[at:end])]
        at = end


def continued(
    model: Model,
    wanted: Sequence[tuple[list[int], Sampling]],
    kept: Kept,
    shown: Shown = unseen,
    *,
    most: int | None = None,
) -> list[list[int]]:
    """Return the tokens that continue each prompt. Prompts of the same sampling run together."""
    keys = [kept.key("continued", prompt, repr(sampling)) for prompt, sampling in wanted]
    groups: dict[Sampling, dict[str, int]] = {}
    for i, key in enumerate(keys):
        if kept.get(key) is None:
            groups.setdefault(wanted[i][1], {})[key] = i
    done = len(wanted) - sum(len(same) for same in groups.values())
    for sampling, same in groups.items():
        names = sorted(same, key=lambda name: len(wanted[same[name]][0]), reverse=True)
        tokens: list[list[int]] = [[] for _ in names]
        prompts = [wanted[same[name]][0] for name in names]
        seeds = tuple(int(name[:15], 16) for name in names)  # of a question, whoever is asked beside it
        drawn = replace(sampling, seeds=seeds) if sampling.temperature else sampling
        for step in model.engine.stream(prompts, drawn, max_rows=most):
            for piece in step:
                tokens[piece.row].append(piece.token)
                if piece.stop_reason is not None:
                    kept.put(names[piece.row], tokens[piece.row])
                    done += 1
                    shown(done, len(wanted))
    return [kept.get(key) for key in keys]


def sampling_of(
    options: Mapping[str, Any], end: str, new_tokens: int, time: int = 0
) -> tuple[Sampling, list[str]]:
    """Return the Sampling of a request's options, and the texts at which its answer ends.

    time: how often the same was asked before; a drawn answer differs each time.
    Raises ConfigError for options that Sampling does not know.
    """
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    fields: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), new_tokens))
    until = [text for text in handle_stop_sequences(fields.pop("until", None), eos=end) if text]
    most, do_sample = fields.pop("max_gen_toks"), fields.pop("do_sample", False)
    values = {name: fields.pop(name) for name in SAMPLED if name in fields}
    if unknown := sorted(fields):
        raise ConfigError(
            f"generation_kwargs: {unknown[0]!r} is unknown", next=f"one of {', '.join(SAMPLED)}"
        )
    values = values if do_sample else {}
    seed = time if values.get("temperature") else 0
    return Sampling(max_new_tokens=most, stop=tuple(until), seed=seed, **values), until


def prompts_of(
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    reading: Reading,
    end: str,
    window: int,
    new_tokens: int,
) -> tuple[list[tuple[list[int], Sampling]], list[list[str]]]:
    """Return (prompt cut from the left, its Sampling) of each (text, options), and where its answer ends.

    end: text of the end token. Raises UserError for an answer that has no room.
    """
    wanted: list[tuple[list[int], Sampling]] = []
    stops: list[list[str]] = []
    times: Counter[str] = Counter()
    for request in requests:
        sampling, until = sampling_of(request[1], end, new_tokens, times[repr(request)])
        times[repr(request)] += 1
        room = window - sampling.max_new_tokens
        if room < 1:
            raise UserError(
                f"a task wants {sampling.max_new_tokens} new tokens, a model has {window} positions",
                next="max_gen_toks in the task's generation_kwargs",
            )
        wanted.append((reading.tokens(request[0])[-room:] or [reading.prefix], sampling))
        stops.append(until)
    return wanted, stops


def harness_model(
    model: Model,
    kept: Kept | None = None,
    shown: Shown = unseen,
    *,
    batch: int | None = None,
    new_tokens: int = NEW_TOKENS,
) -> TemplateLM:
    """Return the model as an lm_eval.api.model.TemplateLM.

        kept        results before an interrupt; None: kept in memory
        shown       called with (requests done, all) after each pass
        batch       sequences of one pass, answers at once; None: as many as memory allows
        new_tokens  most tokens of an answer where a task says nothing

    Raises ConfigError without lm-eval, or for a model without a tokenizer.
    """
    needs_lm_eval()
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    own: Tokenizer = needs_tokenizer(model)
    reading, results = Reading(own), Kept() if kept is None else kept
    window = model.decoder.shape.max_positions

    class HarnessModel(TemplateLM):
        """This model; `chat_template` is its source, by which lm-eval tells caches apart."""

        max_length = window

        @property
        def eot_token_id(self) -> int:
            return reading.prefix if own.eos_id is None else own.eos_id

        @property
        def prefix_token_id(self) -> int:
            return reading.prefix

        @property
        def tokenizer_name(self) -> str:
            return own.identity

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return own.chat.source if chat_template else None

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return reading.chat(chat_history, opens=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return reading.tokens(string, add_special_tokens)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            wanted = [cut(before, tokens, window) for _, before, tokens in requests]
            return scored(model, wanted, results, shown, most=batch)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            wanted: list[Asked] = []
            owners: list[int] = []
            for i, request in enumerate(requests):
                pairs = get_rolling_token_windows(reading.tokens(request.args[0]), reading.prefix, window, 1)
                each = [make_disjoint_window(pair) for pair in pairs]
                wanted += [(list(before), list(after)) for before, after in each]
                owners += [i] * len(each)
            sums = [0.0] * len(requests)
            for i, (log_p, _) in zip(owners, scored(model, wanted, results, shown, most=batch), strict=True):
                sums[i] += log_p
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            end = own.decode([self.eot_token_id], skip_specials=False)
            wanted, stops = prompts_of(
                [request.args for request in requests], reading, end, window, new_tokens
            )
            answers = continued(model, wanted, results, shown, most=batch)
            texts = [own.decode(tokens, skip_specials=True) for tokens in answers]
            return [
                postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)
            ]

    return HarnessModel()


def cut(before: list[int], tokens: list[int], window: int) -> Asked:
    """Drop tokens on the left until all but the last fit into the window. Raises UserError if they cannot."""
    if not tokens:
        raise UserError("a task asks for a continuation without a token", next="look at its doc_to_choice")
    if len(tokens) > window:
        raise UserError(f"a continuation has {len(tokens)} tokens, the model {window} positions")
    room = window + 1 - len(tokens)
    return before[-room:], tokens
