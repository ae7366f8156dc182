"""Published configs with all their fields but the sizes, as models of transformers and ours with the same weights."""

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import transformers
from family_case import NESTED, Case
from family_cases import CASES, randomized

from unfreeze import models
from unfreeze.core.errors import UserError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"


@cache
def bench() -> ModuleType:
    """benchmarks/configs.py, whose `tiny` shrinks a config."""
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "configs.py"
    spec = importlib.util.spec_from_file_location("configs", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["configs"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def files() -> list[Path]:
    """The published configs, without the files that lie beside one."""
    return [file for file in sorted(FOLDER.glob("*.json")) if "hf_quant_config" not in file.name]


def refusal(config: dict) -> str:
    """Why a config is refused, "" where its family is built."""
    try:
        models.shape(config)
    except UserError as error:
        return re.sub(r"^config\.json: |; [0-9]+ families are .*", "", error.message.splitlines()[0])
    return ""


def built() -> list[str]:
    """Names of the published configs whose family is built."""
    return [file.stem for file in files() if not refusal(json.loads(file.read_text(encoding="utf-8")))]


def made(name: str):
    """(transformers' model of a published config made tiny, with random weights; its case)."""
    config = bench().tiny(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    text = config.get("text_config", config)
    kind = bench().transformers_name(text["model_type"])
    own = [
        tuple(pair for pair in c.renamed if pair not in NESTED)
        for c in CASES.values()
        if c.model_type == kind
    ]
    renamed = next(filter(None, own), ())
    transposed = next((c.transposed for c in CASES.values() if c.model_type == kind), False)
    text = {**text, "model_type": kind, "initializer_range": 0.2, "pad_token_id": None}
    if kind in bench().WRAPPED:
        outer = {"vision_config": bench().WRAPPED[kind], "text_config": text}
        # the text class of Qwen3-VL with experts has a default of its own
        text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
        outer["tie_word_embeddings"] = text["tie_word_embeddings"]
        config_class = transformers.CONFIG_MAPPING[config["model_type"]]
        made_of, renamed = config_class.from_dict(outer), (*renamed, *NESTED)
        model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    else:
        config_class = transformers.CONFIG_MAPPING[kind]
        made_of = config_class.from_dict(text)
        words = config_class.__name__.removesuffix("Config").removesuffix("Text")
        model_class = getattr(transformers, f"{words}ForCausalLM")
    torch.manual_seed(0)
    case = Case(config_class.__name__.removesuffix("Config"), {}, renamed=renamed, transposed=transposed)
    return randomized(model_class, made_of), case
