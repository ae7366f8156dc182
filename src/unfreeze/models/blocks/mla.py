"""Multi-head latent attention (DeepSeek-V2/V3, Kimi-K2): keys and values are expanded from one small latent per token, and only it is cached.

T tokens, D model width, H heads, c latent width (kv_lora_rank), n/r/v widths of a head without position, with position, and of its value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class MLA(nn.Module):
    """q = [q_nope | rotate(q_rope)], k = [kv_b(latent).nope | rotate(k_rope), shared by all heads], v = kv_b(latent).value.

    latent = norm(kv_a(x)[:c]), k_rope = kv_a(x)[c:]. The query goes through its own low-rank pair (q_a, q_b) or through q_proj where the
    checkpoint has no q_lora_rank. The rotary pairs are adjacent elements. `scale` holds YaRN's temperature. Source: arXiv:2405.04434, 2.1.
    """

    def __init__(
        self, layer: int, *, num_heads: int, nope: int, rope: int, value: int, scale: float, kv_a_proj_with_mqa: Linear,
        kv_a_layernorm: RMSNorm, kv_b_proj: Linear, o_proj: Linear, q_proj: Linear | None = None, q_a_proj: Linear | None = None,
        q_a_layernorm: RMSNorm | None = None, q_b_proj: Linear | None = None,
    ):  # fmt: skip
        super().__init__()
        self.layer, self.num_heads, self.nope, self.rope, self.value, self.scale = layer, num_heads, nope, rope, value, scale
        self.q_proj, self.q_a_proj, self.q_a_layernorm, self.q_b_proj = q_proj, q_a_proj, q_a_layernorm, q_b_proj
        self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj, self.o_proj = kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q = rotary(self._query(x_TD).unflatten(-1, (self.num_heads, -1)), run.cos_Tr, run.sin_Tr, "adjacent")
        latent_Tc, k_rope_Tr = self.kv_a_proj_with_mqa(x_TD).split((self.kv_b_proj.in_features, self.rope), dim=-1)
        k_rope_Tr = rotary(k_rope_Tr[:, None], run.cos_Tr, run.sin_Tr, "adjacent")[:, 0]
        latent, k_rope = run.remember(self.layer, self.kv_a_layernorm(latent_Tc), k_rope_Tr)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).split((self.nope, self.value), dim=-1)
        k = torch.cat((k_nope, k_rope[..., None, :].expand(*k_nope.shape[:-1], self.rope)), dim=-1)
        return self.o_proj(run.attend(q, k, v, self.scale).flatten(1))

    def _query(self, x_TD: Tensor) -> Tensor:
        if self.q_proj is not None:
            return self.q_proj(x_TD)
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
