"""config.json of a new model, from the few sizes of [shape]; and the number of its parameters.

Every field that the family's reader needs is written, so that transformers reads the same sizes without its
own defaults. Left to the family are only fields without effect on a new model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unfreeze import models
from unfreeze.core.errors import CheckpointError, ConfigError, nearest
from unfreeze.core.units import format_count
from unfreeze.models.allowed import ONLY, READ, SILENT, Fields, unknown
from unfreeze.models.parts import assembled_config

if TYPE_CHECKING:
    from unfreeze.models.decoder import Decoder

ROWS = 64
"""The embedding has a multiple of this many rows: matrix units work on tiles of 64 (vocab_size of GPT-2 grown
from 50,257 to 50,304 rows). Rows above the tokenizer's ids have no name and are never sampled."""
CORRECT = "correct [shape]"
SHARED = "num_shared_experts"
"""A size that few families have; it comes with the further fields."""
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class NewFamily:
    """A family that [shape] can make.

    architecture  transformers' class
    names         our name of a size -> the family's own
    more          (sizes so far) -> further fields of config.json that the family needs
    experts       True if every model of the family has experts
    shared        True if it can have shared experts, their number as a field
    """

    architecture: str
    names: Mapping[str, str]
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda sizes: {}
    experts: bool = False
    shared: bool = False


def _own_width(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """head_dim, which these families do not derive from hidden_size."""
    return {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]}


def _qwen3_moe(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {**_own_width(sizes), "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _deepseek_v3(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Latents of half the width, half a head rotary, one group, the first of several layers dense."""
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return {
        "q_lora_rank": None,
        "kv_lora_rank": max(1, sizes["hidden_size"] // 2),
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": max(2, head // 4 * 2),
        "v_head_dim": head,
        "first_k_dense_replace": int(sizes["num_hidden_layers"] > 1),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "n_shared_experts": 1,
    }


_PLAIN: dict[str, str] = {}
NEW: dict[str, NewFamily] = {
    "llama": NewFamily("LlamaForCausalLM", _PLAIN, _own_width),
    "mistral": NewFamily("MistralForCausalLM", _PLAIN, lambda s: {**_own_width(s), "sliding_window": None}),
    "qwen2": NewFamily("Qwen2ForCausalLM", _PLAIN),
    "qwen3": NewFamily("Qwen3ForCausalLM", _PLAIN, _own_width),
    "mixtral": NewFamily(
        "MixtralForCausalLM",
        {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        lambda s: {**_own_width(s), "sliding_window": None},
        experts=True,
    ),
    "qwen3_moe": NewFamily("Qwen3MoeForCausalLM", _PLAIN, _qwen3_moe, experts=True),
    "deepseek_v3": NewFamily(
        "DeepseekV3ForCausalLM",
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        _deepseek_v3,
        experts=True,
        shared=True,
    ),
    "chain_of_experts": NewFamily(
        "ChainOfExpertsForCausalLM",
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        lambda s: {**_own_width(s), "inner_iter": 2},
        experts=True,
        shared=True,
    ),
}


def padded(vocabulary: int) -> int:
    """Rows of the embedding for that many ids."""
    return -(-vocabulary // ROWS) * ROWS


def config_of(
    family: str,
    sizes: Mapping[str, Any],
    more: Mapping[str, Any],
    *,
    vocabulary: int,
    positions: int,
    bos: int | None = None,
    eos: int | None = None,
    parts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return config.json of a new model.

        sizes       fields of [shape] as named there; None: left out
        more        further fields of config.json, as the family names them; they override
        vocabulary  ids of the tokenizer
        positions   tokens of the longest document, if `more` has no max_position_embeddings
        parts       in place of the family's own (models/parts): the entries of config.json

    Raises ConfigError, one line: a family that is not in NEW, a size that it does not have or that does not
    divide, a field that its reader does not know, a part that is none or cannot stand at its place.
    """
    if family not in NEW:
        raise ConfigError(
            f"shape.family {family!r} cannot be made new{nearest(family, NEW)}",
            next=f"{', '.join(NEW)} can; of another family give a folder with config.json and tokenizer:"
            " --model DIR",
        )
    new, written = NEW[family], {name: of for name, of in sizes.items() if of is not None}
    if SHARED in more:
        written[SHARED], more = more[SHARED], {name: of for name, of in more.items() if name != SHARED}
    _refuse_sizes(family, new, written, more)
    hidden = written["hidden_size"]
    written.setdefault("num_key_value_heads", written["num_attention_heads"])
    wide = written.setdefault("intermediate_size", -(-hidden * 8 // 3 // ROWS) * ROWS)
    if new.experts:
        chosen = written.setdefault("num_experts_per_tok", min(2, written["num_experts"]))
        narrow = max(1, wide // chosen)
        written.setdefault("moe_intermediate_size", narrow)
        if new.names.get("moe_intermediate_size") == "intermediate_size":  # no layer is dense
            written["intermediate_size"] = written.pop("moe_intermediate_size")
    else:
        written = {name: of for name, of in written.items() if name not in EXPERTS}
    fixed = {
        "architectures": [new.architecture],
        "model_type": family,
        "dtype": "float32",
        "vocab_size": padded(vocabulary),
        "max_position_embeddings": positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    config = {
        **fixed,
        **new.more(written),
        **{new.names.get(name, name): of for name, of in written.items()},
        **more,
    }
    _refuse_config(config, more)
    return _with_parts(config, parts) if parts else config


def _refuse_sizes(family: str, new: NewFamily, written: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    hidden, heads = written["hidden_size"], written["num_attention_heads"]
    own_width = {"head_dim", "qk_nope_head_dim"} & more.keys()
    experts = written.get("num_experts", 0)
    for wrong, words, remedy in (
        (
            not own_width and hidden % heads,
            f"shape.hidden_size {hidden:,} is not a multiple of num_attention_heads {heads}",
            f"--shape.hidden-size {max(1, round(hidden / heads)) * heads}, or give head_dim",
        ),
        (
            new.experts and not experts and new.names.get("num_experts", "num_experts") not in more,
            f"shape.family {family} has experts, and num_experts is not given",
            "--shape.num-experts 8",
        ),
        (
            experts and not new.experts,
            f"shape.num_experts {experts}: {family} has no experts",
            f"a family that has: {', '.join(name for name, of in NEW.items() if of.experts)}",
        ),
        (
            written.get("num_shared_experts") is not None and not new.shared,
            f"shape.num_shared_experts: {family} has no shared experts by number",
            f"a family that has: {', '.join(name for name, of in NEW.items() if of.shared)}",
        ),
    ):
        if wrong:
            raise ConfigError(words, next=remedy)


def _refuse_config(config: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Check the config by the family's own reader; its errors name [shape]."""
    fields: Fields = models.FAMILIES[config["model_type"]].FIELDS
    if strange := [line.partition(" = ")[0] for line in unknown(config, fields)]:
        known = [*READ, *fields.read, *fields.absent, *ONLY, *fields.only]
        first = next((name for name in strange if name in more), strange[0])
        raise ConfigError(
            f"shape.{first}: {config['model_type']} has no such field{nearest(first, known)}", next=CORRECT
        )
    if silent := [name for name in more if name in SILENT - {"bos_token_id", "eos_token_id", "pad_token_id"}]:
        raise ConfigError(f"shape.{silent[0]} has no effect on the model", next=f"remove {silent[0]}")
    try:
        models.shape(config)
    except CheckpointError as error:
        raise ConfigError(f"[shape] {error.message.removeprefix('config.json: ')}", next=CORRECT) from None


def _with_parts(config: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The config of the family with other parts; built once on "meta", so that a wrong place is seen here."""
    import torch

    assembled = assembled_config(config, parts)
    try:
        models.from_config(assembled, torch.float32)
    except CheckpointError as error:
        raise ConfigError(f"shape.{error.message}", next=error.next) from None
    return assembled


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; a tied matrix counts once.

    active            of one token: all but the routed experts that it does not choose; of a chain, whose
                      passes may choose different ones, the most
    embeddings        rows of the embedding and of an untied head
    """

    total: int
    active: int
    embeddings: int

    @property
    def without_embeddings(self) -> int:
        """N of the scaling laws."""
        return self.total - self.embeddings

    def fields(self) -> dict[str, int]:
        """Plain JSON values."""
        return {"total": self.total, "active": self.active, "without_embeddings": self.without_embeddings}

    def words(self) -> str:
        """'1.2 M parameters (0.5 M active, 1.1 M without embeddings)'."""
        active = f"{format_count(self.active)} active, " if self.active != self.total else ""
        return (
            f"{format_count(self.total)} parameters ({active}{format_count(self.without_embeddings)} without"
            " embeddings)"
        )


def count_parameters(model: Decoder) -> Parameters:
    """Count the parameters of a model, on "meta" or not. Packed weights do not count right."""
    shape, counted = model.shape, {id(p): p.numel() for p in model.parameters()}
    total = sum(counted.values())
    passes = shape.moe.passes if shape.moe else 1
    chosen = min(shape.num_experts, shape.experts_per_token * passes)
    idle = 0
    for name, parameter in model.named_parameters():
        # routed experts are stacked: [experts, …]
        if ".experts." in name and shape.num_experts and parameter.dim() == 3:
            idle += parameter.numel() // shape.num_experts * (shape.num_experts - chosen)
    embeddings = {
        id(p): p.numel()
        for name, p in model.named_parameters()
        if name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    return Parameters(total, total - idle, sum(embeddings.values()))
