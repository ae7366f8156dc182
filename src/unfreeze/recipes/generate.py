"""unfreeze generate MODEL_OR_RUN --prompt TEXT: continue a text, or answer it as a chat turn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.core.command import Common
from unfreeze.recipes.config import Frozen, parse


class Config(Frozen):
    model: Annotated[str, Positional, arg(metavar="MODEL_OR_RUN")] = Field(description="checkpoint or run folder, adapter folder, or Hugging Face id")
    prompt: str = Field(description="the text to continue, or the question")
    mode: Literal["auto", "text", "chat"] = Field(
        default="auto", description="text: continue the prompt; chat: the prompt is a user's turn; auto: chat if the checkpoint has a chat template"
    )
    max_new_tokens: int = Field(default=200, ge=1, description="tokens to generate at most")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="keep the likeliest tokens whose probabilities sum to p")
    stop: tuple[str, ...] = Field(default=(), description="texts that end the generation")
    seed: int = Field(default=0, description="seed of the sampling")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of the computation; packed weights stay packed")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Print the text; returns it with its tokens."""
    config = parse(Config, arguments, command="generate", description=__doc__ or "", positional=True)
    import unfreeze

    model = unfreeze.load(config.model, dtype=config.dtype)
    settings = config.model_dump(exclude={"model", "prompt", "mode", "dtype"})
    chat = config.mode == "chat" or (config.mode == "auto" and model.has_chat_template)
    if chat:
        text = model.chat([{"role": "user", "content": config.prompt}], **settings)
    else:
        text = model.generate(config.prompt, **settings)
    if not common.json:
        print(text)
    assert model.tokenizer is not None
    return {"text": text, "tokens": model.tokenizer.encode(text, specials=False)}
