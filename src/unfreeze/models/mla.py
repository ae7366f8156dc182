"""Latent attention (MLA) as families describe it: its scale, and the block made of the sizes in shape.mla."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.models.blocks.rope import rope_parameters, yarn_mscale
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.mla import MLA
    from unfreeze.models.factory import Factory


def attention(shape: Shape, index: int, make: Factory, *, kind: type[MLA] | None = None, **parts: Any) -> MLA:
    """Multi-head latent attention with sizes from shape.mla. kind: its class; parts: as in MLA."""
    from unfreeze.models.blocks.mla import MLA

    name = f"model.layers.{index}.self_attn"
    mla, heads, bias = shape.mla, shape.num_heads, bool(shape.config["attention_bias"])
    assert mla is not None
    hidden, head = shape.hidden_size, mla.nope + mla.rope
    if mla.q_lora_rank is None:
        query: dict[str, Any] = {"q_proj": make.linear(f"{name}.q_proj", hidden, heads * head)}
    else:
        query = {
            "q_a_proj": make.linear(f"{name}.q_a_proj", hidden, mla.q_lora_rank, bias=bias),
            "q_a_layernorm": make.norm(mla.q_lora_rank, 1e-6),
            "q_b_proj": make.linear(f"{name}.q_b_proj", mla.q_lora_rank, heads * head),
        }
    return (kind or MLA)(
        index,
        num_heads=heads,
        nope=mla.nope,
        rope=mla.rope,
        value=mla.value,
        scale=_scale(shape),
        pairs="adjacent" if shape.config["rope_interleave"] else "halves",
        kv_a_proj_with_mqa=make.linear(
            f"{name}.kv_a_proj_with_mqa", hidden, mla.kv_lora_rank + mla.rope, bias=bias
        ),
        kv_a_layernorm=make.norm(mla.kv_lora_rank, 1e-6),
        kv_b_proj=make.linear(f"{name}.kv_b_proj", mla.kv_lora_rank, heads * (mla.nope + mla.value)),
        o_proj=make.linear(f"{name}.o_proj", heads * mla.value, hidden, bias=bias),
        **query,
        **parts,
    )


def _scale(shape: Shape) -> float:
    """1/sqrt(d), times YaRN's temperature squared where the config has mscale_all_dim."""
    parameters = rope_parameters(shape.config)
    mscale, temperature = parameters.get("mscale_all_dim"), 1.0
    if mscale and parameters["rope_type"] != "default":
        temperature = yarn_mscale(float(parameters["factor"]), float(mscale))
    return shape.head_dim**-0.5 * temperature**2
