"""unfreeze chat MODEL_OR_RUN: talk with a checkpoint or a run in the terminal.

/reset forgets, /quit or Ctrl-D leaves.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Frozen, ModelName, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import UserError
from unfreeze.job.device import load

if TYPE_CHECKING:
    from unfreeze.generate.model import Model


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL_OR_RUN")] = Field(
        description="checkpoint or run folder, adapter folder, or Hugging Face id"
    )
    system: str = Field(default="", description="system prompt; empty: none")
    max_new_tokens: int = Field(default=400, ge=1, description="tokens of one answer at most")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="keep the likeliest tokens whose probabilities sum to p"
    )
    seed: int = Field(default=0, description="seed of the sampling")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the computation; packed weights stay packed"
    )
    device: str = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Read a line, stream the answer, until the input ends. Returns the conversation."""
    config = parse(Config, arguments, command="chat", description=__doc__ or "", positional=True)
    model = load(config.model, config.dtype, config.device, common)
    settings = config.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "seed"})
    start = [{"role": "system", "content": config.system}] if config.system else []
    messages: list[dict[str, str]] = list(start)
    talk = sys.stderr if common.json else sys.stdout
    if sys.stdin.isatty() and not common.quiet:
        print(f"{config.model}. /reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer.", file=talk)
    while (line := _read(talk)) not in (None, "/quit"):
        if line == "/reset":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(model, messages, settings, talk, common.quiet)
            messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def _read(talk: TextIO) -> str | None:
    """The next line, or None at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=talk, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    return line.strip() if line else None


def _answer(model: Model, messages: list[dict[str, str]], settings: Any, talk: TextIO, quiet: bool) -> str:
    """Print the answer as it comes. -> all of it, or what came before Ctrl-C.

    A conversation that has grown too long is an error on stderr, and the chat goes on.
    """
    said, last = "", None
    try:
        for last in model.stream_chat_pieces(messages, **settings):
            said += last.text
            print(last.text, end="", file=talk, flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:
        print(f"{error}\n(/reset forgets the conversation)", file=sys.stderr)
    print(file=talk, flush=True)
    if last is not None and last.finish_reason == "length" and not quiet:
        print(
            "(the answer ends here: max_new_tokens, or no position left; /reset forgets the conversation)",
            file=sys.stderr,
        )
    return said
