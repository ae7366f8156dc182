"""Linear attention by the gated delta rule in the place of grouped-query attention."""

from __future__ import annotations

from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.delta_attention import DeltaAttention, LatestConv
from unfreeze.models.blocks.recurrent import GatedNorm
from unfreeze.models.parts import At, refuse


def gated_delta(own: Attention, at: At, *, conv: int, gate: bool) -> DeltaAttention:
    """DeltaAttention with the projections of `own`, and its norms of q and k.

    Rotation, window, sinks, scale and cap of the scores are left out: the rule has no scores.
    """
    if type(own) is not Attention:
        refuse(own, "gated_delta", "grouped-query attention", at)
    make, hidden, width = at.make, own.q_proj.in_features, own.head_dim
    channels = {name: getattr(own, f"{name}_proj").out_features for name in "qkv"}
    heads = channels["q"] // width
    added = {"b_proj": heads, "a_proj": heads, **({"g_proj": channels["q"]} if gate else {})}
    projections = {name: getattr(own, name) for name in ("q_proj", "k_proj", "v_proj")}
    projections |= {name: make.linear(f"{at.module}.{name}", hidden, rows) for name, rows in added.items()}
    projections["o_proj"] = own.o_proj
    convolutions: dict[str, LatestConv] = {}
    if conv:
        convolutions = {
            f"{name}_conv1d": LatestConv(of, conv, silu=True, dtype=make.dtype, device=make.device)
            for name, of in channels.items()
        }
    norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(own, name)) is not None}
    eps = at.shape.rms_norm_eps
    return DeltaAttention(
        at.index,
        width,
        projections=projections,
        convolutions=convolutions,
        norms=norms,
        decay=make.decay(heads),
        o_norm=make.norm(width, eps, GatedNorm) if gate else make.norm(width, eps),
    )
