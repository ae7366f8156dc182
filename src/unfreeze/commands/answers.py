"""`unfreeze generate MODEL_OR_URL --data F --out G`: write a model's or server's answers as rows for sft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.parse import writing
from unfreeze.core.command import Common
from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.units import plural
from unfreeze.job.opening.device import load_shown, say
from unfreeze.teach.address import is_url, refuse_without_library
from unfreeze.teach.answers import TOGETHER, Answer, Ask, TeacherAnswers
from unfreeze.teach.budget import Budget, Price
from unfreeze.teach.chat import ChatEndpoint, most_tokens

if TYPE_CHECKING:
    from unfreeze.commands.generate import Config
    from unfreeze.data.rows.row import Conversation

SAY_EVERY = 10.0  # seconds between progress lines
AT_ONCE = 64  # rows that a model in this process answers, then writes


def answer_rows(config: Config, common: Common) -> dict[str, Any]:
    """Generate every answer that `out` does not have yet.

    -> path, answered, left_out (cut, empty or refused).
    """
    if not (config.data and config.out) or config.prompt or config.tokens:
        raise ConfigError(
            "data and out must be given together, without prompt or tokens",
            next="--data rows.jsonl --out answers.jsonl",
        )
    out = Path(config.out)
    if out.suffix != ".jsonl":
        raise ConfigError(
            f"out = {out}: answers are written as JSON lines", next=f"--out {out.with_suffix('.jsonl')}"
        )
    if url := is_url(config.model):
        refuse_without_library(config.model)
    rows = _rows(Path(config.data))
    if not url:  # each record names the dtype itself, not "auto"
        config = config.model_copy(update={"dtype": _dtype(config)})
    answers = TeacherAnswers(out, _source(config, url))
    missing = answers.missing(rows)
    show = say(common)
    if missing and len(missing) < len(rows):
        show(f"{out} has answers to {len(rows) - len(missing)} of {plural(len(rows), 'row')}; continuing")
    if missing:
        ask = _from_server(config, missing, common) if url else _from_model(config, common)
        last_shown = time.monotonic()
        with writing(out.parent, "out"):
            for written in answers.write(rows, ask, together=TOGETHER if url else AT_ONCE):
                if time.monotonic() - last_shown > SAY_EVERY:
                    last_shown = time.monotonic()
                    show(f"{written.answered + written.left_out} of {plural(len(rows), 'row')} answered")
    count = answers.count
    if count.left_out:
        show(
            f"warning: {count.left_out} of {len(rows)} answers were cut, empty or refused; they are in"
            f" {answers.beside} and will not be trained on (--max-new-tokens"
            f" {2 * config.max_new_tokens} cuts fewer)"
        )
    if not common.json:
        print(f"{out}: {plural(count.answered, 'row')}. next: unfreeze sft --model STUDENT --data {out}")
    return {"path": str(out), "answered": count.answered, "left_out": count.left_out}


def _rows(data: Path) -> list[Conversation]:
    from unfreeze.data.rows.files import read_rows

    rows = list(read_rows(data, answers="asked"))
    if not rows:
        raise DataError(f"{data} has no rows", next='each row needs a question, such as {"prompt": "…"}')
    return rows


def _dtype(config: Config) -> str:
    """Name of the dtype that the model computes in on this machine."""
    from unfreeze.job.opening.device import pick_device
    from unfreeze.kernels.precision import precision

    return precision(config.dtype, pick_device(config.device)).name


def _source(config: Config, url: bool) -> dict[str, Any]:
    """Return each record's source fields: model or server address (never its key), and settings."""
    names = ["max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", *([] if url else ["dtype"])]
    settings = {name: getattr(config, name) for name in names}
    served = {"served_name": config.endpoint.served_name} if url else {}
    return {"teacher": config.model, **served, **settings, "stop": list(config.stop)}


def _from_server(config: Config, missing: Sequence[Conversation], common: Common) -> Ask:
    """Return a function that asks the server. First print the most that the answers can cost."""
    if config.top_k:
        raise ConfigError(
            "top_k: OpenAI's chat API has no such field", next="use --top-p, or leave --top-k out"
        )
    from unfreeze.teach.client import Client  # the library openai: an extra, and a second

    endpoint = config.endpoint
    client = Client(config.model, timeout=endpoint.timeout)
    out = Path(config.out)
    budget = Budget(
        out.parent, endpoint.budget_usd, Price(endpoint.price_read, endpoint.price_written), out.name
    )
    read, written = sum(map(most_tokens, missing)), config.max_new_tokens * len(missing)
    if line := budget.worst(client.url, read, written):
        say(common)(f"{plural(len(missing), 'row')}: {line}")
    settings: dict[str, Any] = {
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": config.seed,
        **({"stop": list(config.stop)} if config.stop else {}),
    }
    return ChatEndpoint(client, endpoint.served_name, settings, budget.reserve)


def _from_model(config: Config, common: Common) -> Ask:
    """Return a function that asks a model in this process.

    The seed of an answer is made of the configured seed and the number of its row. After Ctrl-C the answers
    that have ended are kept.
    """
    model = load_shown(config.model, config.dtype, config.device, common, config.base)
    options: Any = config.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "stop"})

    def ask(rows: Sequence[Conversation]) -> list[Answer | BaseException]:
        from unfreeze.data import encode_chat
        from unfreeze.generate.answer import Interrupted
        from unfreeze.generate.model import sampling

        tokenizer = model.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"{config.model} has no tokenizer, so it cannot write text", next="use another model"
            )
        prompts = [encode_chat(tokenizer, row.messages, row.tools) for row in rows]
        room = model.decoder.shape.max_positions
        answers: list[Answer | BaseException] = [
            Answer("", f"no room: the prompt has {len(prompt)} tokens, the model only {room} positions")
            for prompt in prompts
        ]
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < room]
        seeds = [number(config.seed, rows[i].row) for i in fitting]
        settings = sampling({**options, "seeds": seeds})
        try:
            completions = model.engine.generate([prompts[i] for i in fitting], settings)
        except Interrupted as interrupt:
            completions = interrupt.completions
        for i, done in zip(fitting, completions, strict=True):
            answers[i] = Answer(done.text, "stop" if done.finish_reason == "stop" else done.stop_reason)
            if done.stop_reason == "interrupted":
                answers[i] = KeyboardInterrupt("the same command continues")
        return answers

    return ask
