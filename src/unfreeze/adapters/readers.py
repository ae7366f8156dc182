"""Facts about other programs that read adapters, each with its source and version.

No torch. The facts come from the loading code of the named version. tests/adapters/test_readers.py compares
them with what that code produced from our files (benchmarks/reader_vectors.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Layout = Literal["peft", "per-expert"]


@dataclass(frozen=True)
class Drop:
    """Adapters that a reader never applies, by the last part of their names.

    beside, without   only in a model that has linear layers named `beside`, and none named `without`
    """

    names: tuple[str, ...]
    why: str
    issue: str = ""
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def applies(self, leaves: frozenset[str]) -> bool:
        """True if it applies to a model with linear layers of these names."""
        return leaves.issuperset(self.beside) and leaves.isdisjoint(self.without)


@dataclass(frozen=True)
class Reader:
    """A program that reads adapters.

    version    the one whose loading code was read
    source     its files that were read
    layout     of adapter_model.safetensors (layouts.py)
    drops      adapters that it ignores or cannot load: left out of the file, and reported
    together   linear layers that it fuses: if one of them has an adapter, the others get one of zeros
    experts_whole   as `together`, for gate, up and down of routed experts
    ranks      the ranks it allocates memory for; the flag that sets it is `rank_flag`
    refuses    model_type -> the issue, for models whose adapters it cannot load at all
    """

    name: str
    version: str
    source: str
    layout: Layout
    drops: tuple[Drop, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    experts_whole: bool = False
    ranks: tuple[int, ...] = ()
    rank_flag: str = ""
    refuses: Mapping[str, str] | None = None

    def dropped(self, adapted: Iterable[str], linear: Iterable[str]) -> dict[str, Drop]:
        """Name of an adapted linear layer -> the reason why this reader doesn't apply it.

        linear: the names of all linear layers of the model.
        """
        leaves = frozenset(name.rsplit(".", 1)[-1] for name in linear)
        rules = [drop for drop in self.drops if drop.applies(leaves)]
        drops_of = {
            name: [drop for drop in rules if name.rsplit(".", 1)[-1] in drop.names] for name in adapted
        }
        return {name: drops[0] for name, drops in drops_of.items() if drops}

    def room_for(self, rank: int) -> str:
        """The flag that allocates memory for a rank; "" if the default is enough or there is no flag."""
        fitting = [room for room in self.ranks if room >= rank]
        if not self.rank_flag or not fitting or fitting[0] <= 16:
            return ""
        return f"{self.rank_flag} {fitting[0]}"


PEFT = Reader(
    name="peft",
    version="0.21.2",
    source="tuners/lora/layer.py, tuners/tuners_utils.py, utils/transformers_weight_conversion.py",
    layout="peft",
    drops=(
        Drop(
            names=("out_proj",),
            # nemotron_h; it takes the adapters of Granite's Mamba layers and of LFM2's convolutions
            beside=("in_proj", "up_proj"),
            without=("gate_proj",),
            why="it refuses adapters of out_proj in nemotron_h, because Mamba kernels read the base weight",
        ),
    ),
)
VLLM = Reader(
    name="vllm",
    version="0.33.0",
    source=(
        "lora/peft_helper.py, lora/lora_model.py, lora/lora_weights.py, lora/model_manager.py,"
        " model_executor/layers/attention/mla_attention.py"
    ),
    layout="per-expert",
    drops=(
        Drop(
            names=("kv_b_proj",),
            beside=("kv_a_proj_with_mqa",),
            why="its MLA attention reads the base weight of kv_b_proj and never calls the adapted layer",
            issue="https://github.com/vllm-project/vllm/issues/48974",
        ),
    ),
    experts_whole=True,  # PackedLoRALayerWeights.pack_moe asserts all three of every expert
    ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    rank_flag="--max-lora-rank",
    refuses={"kimi_k25": "https://github.com/vllm-project/vllm/issues/43840"},
)
SGLANG = Reader(
    name="sglang",
    version="0.5.23",
    source="srt/lora/lora.py, srt/lora/lora_config.py, srt/lora/utils.py, srt/lora/mem_pool.py",
    layout="per-expert",
    drops=(
        Drop(
            names=("q_proj", "kv_a_proj_with_mqa"),
            beside=("kv_a_proj_with_mqa",),
            without=("q_a_proj",),
            why=(
                "it takes q_proj for a part of qkv_proj and kv_a_proj_with_mqa for a part of"
                " fused_qkv_a_proj_with_mqa, which a model with MLA and no q_lora_rank doesn't have"
            ),
        ),
    ),
    # LoRAAdapter.normalize_qkv_proj, normalize_gate_up_proj, normalize_fused_qkv_a_proj
    together=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")),
    experts_whole=True,  # they are wrapped if gate_up_proj and down_proj both are targets
)
READERS = {reader.name: reader for reader in (PEFT, VLLM, SGLANG)}
