"""`unfreeze generate MODEL_OR_URL --data F --out G`: the answers of a model or a server, as rows for sft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.parse import writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.job.opening.device import load_shown, say
from unfreeze.teach.address import is_url, refuse_without_library
from unfreeze.teach.answers import Answer, Ask, TeacherAnswers
from unfreeze.teach.budget import Budget, Price
from unfreeze.teach.chat import ChatEndpoint, most_tokens

if TYPE_CHECKING:
    from unfreeze.commands.generate import Config
    from unfreeze.data.rows.row import Conversation

SAY_EVERY = 10.0  # seconds between two lines of progress


def answer_rows(config: Config, common: Common) -> dict[str, Any]:
    """Ask for every row's answer that isn't in `out` yet. -> path, answered, left_out (cut or empty)."""
    if not (config.data and config.out) or config.prompt or config.tokens:
        raise ConfigError(
            "data and out go together, and without prompt and tokens",
            next="--data rows.jsonl --out answers.jsonl",
        )
    out = Path(config.out)
    if out.suffix != ".jsonl":
        raise ConfigError(f"out = {out}: answers are JSON lines", next=f"--out {out.with_suffix('.jsonl')}")
    if url := is_url(config.model):
        refuse_without_library(config.model)
    rows = _rows(Path(config.data))
    if not url:  # the dtype itself stands in each record
        config = config.model_copy(update={"dtype": _dtype(config)})
    answers = TeacherAnswers(out, _source(config, url))
    missing = answers.missing(rows)
    tell = say(common)
    if missing and len(missing) < len(rows):
        tell(f"{out} has answers to {len(rows) - len(missing)} of {len(rows)} rows; going on")
    if missing:
        ask = _from_server(config, missing, common) if url else _from_model(config, common)
        said = time.monotonic()
        with writing(out.parent, "out"):
            for written in answers.write(rows, ask, again=not url):
                if time.monotonic() - said > SAY_EVERY:
                    said = time.monotonic()
                    tell(f"{written.answered + written.left_out} of {len(rows)} rows are answered")
    count = answers.count
    if count.left_out:
        tell(
            f"warning: {count.left_out} of {len(rows)} answers were cut, empty or refused; they are in"
            f" {answers.beside} and are not taught (--max-new-tokens {2 * config.max_new_tokens} cuts fewer)"
        )
    if not common.json:
        print(f"{out}: {count.answered} rows. next: unfreeze sft --model STUDENT --data {out}")
    return {"path": str(out), "answered": count.answered, "left_out": count.left_out}


def _rows(data: Path) -> list[Conversation]:
    from unfreeze.data.rows.files import read_rows

    rows = list(read_rows(data, answers="asked"))
    if not rows:
        raise DataError(f"{data} has no rows", next='a row asks something: {"prompt": "…"}')
    return rows


def _dtype(config: Config) -> str:
    """The dtype that the model answers in, on this machine."""
    from unfreeze.job.opening.device import pick_device
    from unfreeze.kernels.precision import precision

    return precision(config.dtype, pick_device(config.device)).name


def _source(config: Config, url: bool) -> dict[str, Any]:
    """Who answers and how, as it stands in each record. The address of a server, never its key."""
    names = ["max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", *([] if url else ["dtype"])]
    settings = {name: getattr(config, name) for name in names}
    served = {"served_name": config.endpoint.served_name} if url else {}
    return {"teacher": config.model, **served, **settings, "stop": list(config.stop)}


def _from_server(config: Config, missing: Sequence[Conversation], common: Common) -> Ask:
    """The server's answers, once it is known what they cost at most."""
    if config.top_k:
        raise ConfigError("top_k is no field of OpenAI's chat", next="--top-p, or without --top-k")
    from unfreeze.teach.client import Client  # the library openai: an extra, and a second

    asked = config.endpoint
    client = Client(config.model, timeout=asked.timeout)
    out = Path(config.out)
    budget = Budget(out.parent, asked.budget_usd, Price(asked.price_read, asked.price_written), out.name)
    read, written = sum(map(most_tokens, missing)), config.max_new_tokens * len(missing)
    if line := budget.worst(client.url, read, written):
        say(common)(f"{len(missing)} rows: {line}")
    settings: dict[str, Any] = {
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": config.seed,
        **({"stop": list(config.stop)} if config.stop else {}),
    }
    return ChatEndpoint(client, asked.served_name, settings, budget.reserve)


def _from_model(config: Config, common: Common) -> Ask:
    """A model's answers, in memory here. A batch's draws depend on the seed and its first row alone."""
    model = load_shown(config.model, config.dtype, config.device, common, config.base)
    options: Any = config.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "stop"})

    def ask(rows: Sequence[Conversation]) -> list[Answer | Exception]:
        from unfreeze.data import encode_chat
        from unfreeze.generate.model import sampling

        tokenizer = model.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{config.model} has no tokenizer, so it writes no texts", next="another model")
        prompts = [encode_chat(tokenizer, row.messages, row.tools) for row in rows]
        room = model.decoder.shape.max_positions
        answers: list[Answer | Exception] = [
            Answer("", f"no room: the prompt has {len(prompt)} tokens, the model {room} positions")
            for prompt in prompts
        ]
        fit = [i for i, prompt in enumerate(prompts) if len(prompt) < room]
        options["seed"] = config.seed * 1_000_003 + rows[0].row
        drawn = sampling(options)
        done = model.engine.generate([prompts[i] for i in fit], drawn)
        for i, answer in zip(fit, done, strict=True):
            answers[i] = Answer(answer.text, answer.finish_reason)
        return answers

    return ask
