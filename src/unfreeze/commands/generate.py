"""unfreeze generate MODEL_OR_RUN --prompt TEXT: continue a text; --mode chat sends it as a question.

--tokens 1 403 407 takes token ids instead of a text. --data rows.jsonl --out answers.jsonl answers every row
and writes rows for `unfreeze sft`; MODEL_OR_RUN can then be the address of an OpenAI-compatible server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.device import Device
from unfreeze.config.endpoint import EndpointConfig
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, refuse_second
from unfreeze.core.command import Common
from unfreeze.core.draws import SEEDS
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import plural
from unfreeze.job.opening.device import load_shown, say

if TYPE_CHECKING:
    from unfreeze.generate.answer import Completion
    from unfreeze.generate.model import Model

LIMIT = "--max-new-tokens allows no more"


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL_OR_RUN")] = Field(
        description="checkpoint or run folder, adapter folder, or Hugging Face id; with --data also"
        " http(s)://…"
    )
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, if the one it names is not on this machine"
    )
    prompt: str = Field(default="", description="the text to continue, or the question")
    tokens: tuple[int, ...] = Field(
        default=(), description="the prompt as token ids; for checkpoints without a tokenizer"
    )
    data: Folder = Field(
        default="", description="rows to answer; an answer already there is replaced. Needs --out"
    )
    out: Folder = Field(default="", description="file for the answers; an existing one is continued")
    mode: Literal["auto", "text", "chat"] = Field(
        default="text",
        description=(
            "text: continue the prompt as it is; chat: the prompt is a user's turn; auto: chat if the"
            " checkpoint has a template"
        ),
    )
    max_new_tokens: int = Field(default=200, ge=1, description="most tokens to generate")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="keep the likeliest tokens whose probabilities sum to p"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that stop generation"
    )
    seed: int = Field(default=0, ge=SEEDS[0], le=SEEDS[1], description="seed of the sampling")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype. auto: bfloat16 where the hardware has bf16 matmul units"
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")
    endpoint: EndpointConfig = EndpointConfig()


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Print the continuation (its token ids if the checkpoint has no tokenizer).

    Ctrl-C prints what is there.
    -> text, tokens (every sampled id), finish_reason, stop_reason; with --data: path, answered, left_out.
    """
    refuse_second(arguments, "the text to continue goes in --prompt", 'unfreeze generate RUN --prompt "…"')
    config = parse(Config, arguments, command="generate", description=__doc__ or "", positional=True)
    if config.data or config.out:
        from unfreeze.commands.answers import answer_rows

        return answer_rows(config, common)
    if bool(config.prompt) == bool(config.tokens):
        raise ConfigError(
            "give either prompt or tokens", next='--prompt "Once upon a time", or --tokens 1 403 407'
        )
    if config.tokens and config.mode == "chat":
        raise ConfigError(
            "mode chat needs a text; tokens are continued directly", next="--prompt TEXT --mode chat"
        )
    model = load_shown(config.model, config.dtype, config.device, common, config.base)
    from unfreeze.generate.answer import Interrupted  # brings torch: after the refusals

    as_chat = config.mode == "chat" or (config.mode == "auto" and model.has_chat_template)
    if model.has_chat_template and not config.tokens:
        how = (
            "sent as a chat turn (--mode text continues it as plain text)"
            if as_chat
            else "continued as text (--mode chat sends it as a question)"
        )
        say(common)(f"the prompt is {how}")
    show = say(common)
    try:
        done, interrupted = complete(model, config, as_chat), False
    except Interrupted as interrupt:
        (done,), interrupted = interrupt.completions, True
    if not common.json:
        print(done.text if model.tokenizer is not None else " ".join(map(str, done.tokens)))
    if interrupted:
        show(f"interrupted after {plural(len(done.tokens), 'token')}")
    elif done.finish_reason == "length":
        positions = model.decoder.shape.max_positions
        full = f"the model's {positions} positions are full" if done.stop_reason == "window" else LIMIT
        show(f"stopped after {plural(len(done.tokens), 'token')}: {full}")
    result = {"text": done.text, "tokens": done.tokens, "finish_reason": done.finish_reason}
    return {**result, "stop_reason": done.stop_reason, **({"exit_code": 130} if interrupted else {})}


def complete(model: Model, config: Config, as_chat: bool) -> Completion:
    """Continue a prompt or token ids, or answer a chat turn."""
    settings: Any = config.model_dump(
        include={"max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed"}
    )
    if as_chat and not config.tokens:
        return model.chat_batch([config.prompt], **settings)[0]
    return model.complete([config.tokens or config.prompt], **settings)[0]
