"""Test how each field of config.json is followed: change, add or remove one field at a time, and compare
logits with transformers'.

    python benchmarks/configs.py FOLDER_OF_CONFIGS [--only NAME] [--write docs/reference/config_json.md]

Each config of a built family keeps all its fields but the sizes, which are made tiny; weights are random,
written under transformers' names. A change of one field is then

    followed   our logits equal transformers' (within 1e-4), and the change moved them
    no effect  our logits equal transformers', and the change did not move them
    refused    one error before any weight is read
    named      a line says that the field is not followed
    SILENT     transformers' logits differ from ours, or it fails, and no line said so. Exit code 1 if there
               is one

--write replaces the table in a page, between the lines that name this script.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import models
from unfreeze.core.errors import UserError

BEGIN, END = "<!-- made by benchmarks/configs.py -->\n", "<!-- end of benchmarks/configs.py -->\n"
TOLERANCE = 1e-4
TOKENS = [5, 17, 3, 88, 41, 2, 9, 60, 61, 62, 63, 11, 7, 30, 31, 32, 33, 34, 35, 36]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "moe_num_experts": 8,
    "intermediate_size_mlp": 80,
    "moe_k": 2,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "top_k_experts": 2,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 16,
    "rotary_dim": 8,
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_n_heads": 16,  # with few heads many scores are 0, and the best are not one choice
    "index_head_dim": 16,
    "initializer_range": 0.2,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "full_attention_interval": 2,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}
FIRST_AND_LAST = ("mlp_layer_types", "indexer_types")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
OTHER: dict[str, Any] = {
    "torch_dtype": "float32",
    "dtype": "float32",
    "model_type": "t5",
    "hidden_act": "gelu",
    "mlp_hidden_act": "gelu",
    "mamba_hidden_act": "gelu",
    "hybrid_override_pattern": "M*-E",
    "layers_block_type": ["attention", "moe", "mamba"],
    "time_step_limit": [0.2, 0.5],
    "compress_ratios": [0, 4, 128],
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "architectures": ["MistralForCausalLM"],
    "auto_map": {},
    "type": "linear",
    "rope_type": "linear",
    "problem_type": "regression",
    "eos_token_id": 4,
    "pruned_heads": {"0": [1]},
    "sliding_window": 4,
    "n_group": 2,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "mlp_only_layers": [1],
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "vision_config": {"hidden_size": 8},
    "tokenizer_class": "LlamaTokenizer",
    "transformers_version": "4.40.0",
}
"""Another value of a field, where its type doesn't give one."""
ADDED: dict[str, Any] = {
    "is_causal": False,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "use_sliding_window": True,
    "rope_interleave": False,
    "head_dim": 24,
    "clip_qkv": 0.1,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "attention_multiplier": 0.5,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 5.0,
    "qk_norm": True,
    "no_rope_layers": [1, 0, 1],
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.1,
    "per_layer_config": {"0": {"rms_norm_eps": 0.5}},
    "original_max_position_embeddings": 8,
    "moe_layer_freq": 2,
    "scoring_func": "softmax",
    "use_bidirectional_attention": True,
    "num_local_experts": 4,
    "sliding_window": 4,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_mtp_layers": 2,
    "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "qkv_bias": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "attention_chunk_size": 4,
    "mscale": 2.0,
    "compression_config": {"format": "x"},
    "shared_expert_intermediate_size": 32,
    "use_qk_norm": False,
    "layer_norm_eps": 0.1,
    "hidden_dropout": 0.1,
    "n_shared_experts": 2,
}


QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
WRAPPED: dict[str, dict[str, Any]] = dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), QWEN_VISION)
"""Text models that transformers has only inside the release around them: the smallest tower there."""


@dataclass(frozen=True)
class Change:
    """`field` of a config at another value; "." goes into a table. value ABSENT: left out."""

    field: str
    value: Any

    def of(self, config: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(config)
        *path, name = self.field.split(".")
        table = changed
        for key in path:
            table = table[key]
        if self.value is ABSENT:
            table.pop(name)
        else:
            table[name] = copy.deepcopy(self.value)
        return changed


ABSENT = object()


def repair(model: torch.nn.Module) -> None:
    """Nemotron-H of transformers 5.23 clamps dt at time_step_min, not at its time_step_limit (its #48989)."""
    for mixer in model.modules():
        if type(mixer).__name__ == "NemotronHMamba2Mixer":
            mixer.time_step_limit = tuple(min(limit, 3e38) for limit in mixer.config.time_step_limit)


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """All fields of a config but its sizes, which become small; quantization is left out, since weights here
    are random and dense."""
    text = dict(config.get("text_config") or config)
    text.pop("quantization_config", None)
    small = {name: size for name, size in SIZES.items() if text.get(name) is not None}
    heads, groups = text["num_attention_heads"], text.get("num_key_value_heads", text["num_attention_heads"])
    small["num_key_value_heads"] = 4 if heads == groups else 2
    if text.get("kv_lora_rank") and text.get("head_dim"):
        small["head_dim"] = SIZES["qk_rope_head_dim"]
    if text.get("qk_head_dim"):
        small["qk_head_dim"] = SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]
    if text.get("attention_value_scale"):  # MiMo-V2: a third of a head rotates, in pairs
        small |= {"head_dim": 24, "swa_head_dim": 24, "v_head_dim": 16, "swa_v_head_dim": 16}
        small |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2 * small["num_key_value_heads"]}
    small |= {  # layer_types and its like, an entry per layer
        name: value[: SIZES["num_hidden_layers"]]
        for name, value in text.items()
        if isinstance(value, list) and len(value) == text.get("num_hidden_layers")
    }
    if "linear_attention" in (
        small.get("layer_types") or ()
    ):  # transformers' cache needs attention somewhere
        small["layer_types"] = [*small["layer_types"][:-1], "full_attention"]
    if text.get("linear_key_head_dim"):  # at .2 float32 itself is .0004 from float64 in two such layers
        small["initializer_range"] = 0.05
    for name in ("hybrid_override_pattern", "layers_block_type"):  # Nemotron-H: a layer of each kind
        if text.get(name):
            kinds = list(dict.fromkeys(text[name]))
            small[name] = "".join(kinds) if isinstance(text[name], str) else kinds
            small["num_hidden_layers"] = len(kinds)
    if text.get("compress_ratios"):  # DeepSeek-V4: one key, a layer of each kind, a choice by the token
        small |= {"num_key_value_heads": 1, "compress_ratios": [4, 128, 0], "num_hash_layers": 1}
        small |= {"index_topk": 2, "o_groups": 2, "o_lora_rank": 24}
    if text.get("mamba_d_head"):
        small["mamba_d_head"] = text.get("mamba_expand", 2) * SIZES["hidden_size"] // SIZES["mamba_n_heads"]
    # releases begin with several layers of the first kind: three layers would have no other
    small |= {
        name: [*small[name][:1], text[name][-1], *small[name][:1]]
        for name in FIRST_AND_LAST
        if text.get(name)
    }
    if (text.get("n_group") or 1) > 1:
        small |= {"n_group": 4, "topk_group": 2}
    small |= {name: index + 1 for index, name in enumerate(IDS) if text.get(name) is not None}
    text |= small
    if "text_config" not in config:
        return text
    outer = {name: index + 1 for index, name in enumerate(IDS) if config.get(name) is not None}
    return (
        {name: value for name, value in config.items() if name != "quantization_config"}
        | outer
        | {"text_config": text}
    )


def changes(config: dict[str, Any]) -> Iterator[Change]:
    """Each field at another value and left out, each of a rotary table's too, and the fields of ADDED that it
    lacks."""
    prefix = "text_config." if "text_config" in config else ""
    text = config.get("text_config", config)
    for name, value in text.items():
        yield from (Change(f"{prefix}{name}", changed) for changed in (_other(name, value), ABSENT))
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            for key, inner in value.items():
                yield from (
                    Change(f"{prefix}{name}.{key}", changed) for changed in (_other(key, inner), ABSENT)
                )
                for field, value in inner.items() if isinstance(inner, dict) else ():  # a table per kind
                    yield Change(f"{prefix}{name}.{key}.{field}", _other(field, value))
    yield from (Change(f"{prefix}{name}", value) for name, value in ADDED.items() if text.get(name) is None)
    if prefix:
        outer = {name: value for name, value in config.items() if name != "text_config"}
        yield from (Change(name, _other(name, value)) for name, value in outer.items())
        yield from (Change(name, value) for name, value in ADDED.items() if name not in outer)


def _other(name: str, value: Any) -> Any:
    """Another value of the same type."""
    if name in OTHER and value != OTHER[name]:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value < 3 else 2 * value
    if isinstance(value, float):
        return 2 * value if value else 0.1
    if isinstance(value, str):
        return f"{value}x"
    return [] if isinstance(value, list) and value else {} if isinstance(value, dict) and value else 1


def transformers_name(model_type: str) -> str:
    """The model_type under which transformers knows a family; kimi_k2 -> deepseek_v3, its family's file.

    Raises KeyError, with what to do, where transformers has neither.
    """
    family = models.FAMILIES[model_type].__name__.rpartition(".")[2]
    known = [name for name in (model_type, family) if name in transformers.CONFIG_MAPPING]
    if not known:
        raise KeyError(
            f"transformers {transformers.__version__} has no model_type {model_type!r}, nor one named after"
            f" its file {family}.py: name the family's file after transformers' model_type"
        )
    return known[0]


def within(config: Any) -> Any:
    """A class's own pad_token_id may lie beyond a small vocabulary; no row is padded here."""
    text = config.get_text_config()
    if text.pad_token_id is not None and text.pad_token_id >= text.vocab_size:
        text.pad_token_id = None
    return config


class Bench:
    """One tiny config as two checkpoints with the same weights: `ours` as published, `theirs` as
    transformers' class of the text model."""

    def __init__(self, config: dict[str, Any], folder: Path):
        self.config, self.ours, self.theirs = config, folder / "ours", folder / "theirs"
        text = config.get("text_config", config)
        self.model_type = transformers_name(text["model_type"])
        self.config_class = transformers.CONFIG_MAPPING[self.model_type]
        self.wrapped = self.model_type in WRAPPED
        if self.wrapped:
            self.config_class = transformers.CONFIG_MAPPING[config["model_type"]]
            self.model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[self.config_class]
        else:
            # by its name: Mistral 4's is not in MODEL_FOR_CAUSAL_LM_MAPPING
            name = self.config_class.__name__.removesuffix("Config").removesuffix("Text")
            self.model_class = getattr(transformers, f"{name}ForCausalLM")
        torch.manual_seed(0)
        model = self.model_class(within(self.config_class.from_dict(self._text(config)))).float()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name:
                    tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
                elif name.endswith(("bias", "e_score_correction_bias")):
                    tensor.copy_(0.2 * torch.randn_like(tensor))
        model.save_pretrained(self.theirs, save_original_format=True)
        self.ours.mkdir()
        tensors = load_file(self.theirs / "model.safetensors")
        prefix = "language_model." if "text_config" in config and not self.wrapped else ""
        save_file(
            {prefix + name: tensor for name, tensor in tensors.items()},
            self.ours / "model.safetensors",
            metadata={"format": "pt"},
        )
        self.fields: dict[str, Any] | None = None  # of the base, as transformers' class holds them
        base = self._transformers(config)
        assert isinstance(base, torch.Tensor), base
        self.base = base
        self.fields = within(self.config_class.from_pretrained(self.theirs)).to_dict()

    def _text(self, config: dict[str, Any]) -> dict[str, Any]:
        text = copy.deepcopy(config.get("text_config", config))
        known = text.get("model_type") in models.FAMILIES
        text |= {"model_type": self.model_type} if known else {}
        if not self.wrapped:
            return text
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        outer = {"text_config": text, "vision_config": WRAPPED[self.model_type]}
        return {"model_type": config["model_type"], "tie_word_embeddings": bool(tied), **outer}

    def _transformers(self, config: dict[str, Any]) -> torch.Tensor | str:
        """Its logits, or the reason why there are none: an error, or tensors that don't fit."""
        try:
            (self.theirs / "config.json").write_text(json.dumps(self._text(config)))
            text = within(self.config_class.from_pretrained(self.theirs))
            if text.to_dict() == self.fields:
                return self.base  # the change is none to transformers: its model is the same
            model, info = self.model_class.from_pretrained(
                self.theirs,
                config=text,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            missing = [
                name
                for name in info["missing_keys"]
                if not name.endswith("lm_head.weight") or not text.tie_word_embeddings
            ]
            if missing or info["mismatched_keys"]:
                return f"{len(missing) + len(info['mismatched_keys'])} tensors don't fit"
            repair(model)
            with torch.no_grad():
                return model.eval()(torch.tensor([TOKENS]))[0][0].float()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def _unfreeze(self, config: dict[str, Any]) -> tuple[torch.Tensor | str, list[str]]:
        """(logits, or the refusal; the lines that loading printed)."""
        lines: list[str] = []
        (self.ours / "config.json").write_text(json.dumps(config))
        try:
            return unfreeze.load(self.ours, say=lines.append, dtype="float32").logits([TOKENS])[0], lines
        except UserError as error:
            return error.message, lines

    def judge(self, change: Change) -> tuple[str, str]:
        """(followed, no effect, refused, named or SILENT; the words that go with it)."""
        config = change.of(self.config)
        ours, lines = self._unfreeze(config)
        name = change.field.split(".")[-1]
        if isinstance(ours, str):
            return "refused", ours
        if any(f"{name} = " in line for line in lines):
            return "named", lines[0]
        theirs = self._transformers(config)
        if isinstance(theirs, str):
            return "SILENT", f"transformers: {theirs}"
        if theirs.shape != ours.shape or not float((theirs - ours).abs().max()) <= TOLERANCE:
            return "SILENT", "logits differ"
        return ("followed" if float((theirs - self.base).abs().max()) > TOLERANCE else "no effect"), ""


def run(folder: Path, only: str = "") -> Iterator[tuple[str, str, Change, str, str]]:
    """(file, model_type, change, verdict, words) over the configs of a folder; a change that another file
    made is not made again."""
    seen: set[str] = set()
    for file in sorted(folder.glob("*.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        try:
            models.shape(config)
        except UserError:
            continue
        if only not in file.name:
            continue
        config = tiny(config)
        kind = config.get("model_type", "")
        work = Path(tempfile.mkdtemp(prefix="configs-"))
        try:
            bench = Bench(config, work)
            for change in changes(config):
                *path, name = change.field.split(".")
                table = config
                for key in path:
                    table = table[key]
                key = json.dumps(
                    [
                        kind,
                        change.field,
                        table.get(name),
                        "absent" if change.value is ABSENT else change.value,
                    ]
                )
                if key not in seen:
                    seen.add(key)
                    yield file.stem, kind, change, *bench.judge(change)
        finally:
            shutil.rmtree(work)


ORDER = ("followed", "no effect", "refused", "named", "SILENT")


def table(rows: list[tuple[str, str, Change, str, str]]) -> str:
    """The counts per model_type, then every field with the verdicts of its changes."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    fields: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for _, kind, change, verdict, _ in rows:
        counts[kind][verdict] += 1
        fields[change.field.removeprefix("text_config.")][verdict].add(
            kind + (" (absent)" if change.value is ABSENT else "")
        )
    lines = [f"| model_type | changes | {' | '.join(ORDER)} |", "|---|" + "---|" * (len(ORDER) + 1)]
    for kind, counter in counts.items():
        lines.append(
            f"| {kind} | {counter.total()} | {' | '.join(str(counter[verdict]) for verdict in ORDER)} |"
        )
    total = sum(counts.values(), Counter())
    lines.append(f"| all | {total.total()} | {' | '.join(str(total[verdict]) for verdict in ORDER)} |")
    lines += ["", f"| field | {' | '.join(ORDER[:-1])} |", "|---|" + "---|" * (len(ORDER) - 1)]
    for field, verdicts in sorted(fields.items()):
        cells = [", ".join(sorted(verdicts[verdict])) for verdict in ORDER[:-1]]
        lines.append(f"| `{field}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kinds_in(text: str) -> set[str]:
    """Return the model types that have a row in the first table."""
    return set(re.findall(r"^\| ([\w-]+) \| \d+ \|", text, flags=re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files whose names contain this")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for row in run(options.folder, options.only):
        rows.append(row)
        file, _, change, verdict, words = row
        value = "absent" if change.value is ABSENT else json.dumps(change.value)
        print(f"{verdict:<9}  {file}  {change.field} -> {value}  {words}"[:200], flush=True)
    text = table(rows)
    print(text.split("\n\n")[0])
    if options.write:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        if gone := kinds_in(rest.partition(END)[0]) - kinds_in(text):
            raise SystemExit(
                f"{options.write}: the rows of {', '.join(sorted(gone))} would be lost: their configs are not"
                f" in {options.folder}\n  next: give the folder of all published configs, or print without"
                " --write and add the printed row by hand"
            )
        options.write.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    return int(any(verdict == "SILENT" for *_, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
