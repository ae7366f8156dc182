"""Adapters on disk, the writing side: the tensors, their names and adapter_config.json.

Two layouts, both in adapter_model.safetensors under PEFT's prefix "base_model.model.":

peft         one fused pair per stacked parameter (`target_parameters`, peft >= 0.19); the expert is the
             slowest index in A and the *fastest* in B
             gate_up: ….experts.base_layer.lora_A (E·r, D), lora_B (2I, r·E)
             down:    ….experts.lora_A (E·r, I), lora_B (D, r·E)
             If ranks or scales differ, rank_pattern and alpha_pattern list them: peft follows them.

per-expert   every routed expert has its own two-dimensional pairs:
             ….experts.{e}.{gate,up,down}_proj.lora_{A,B}.weight (vLLM, SGLang, prime-rl)
             One r and one lora_alpha for all, because not all of its readers know patterns: lower ranks
             are padded with zeros, and a scale other than lora_alpha / r is multiplied into B.

The scale is always written as lora_alpha / r, the rule every reader knows. The safetensors header has the
layout's name. adapter_config.json has it for per-expert only, because peft warns about keys it does not know.

E experts, D model width, I expert width, R rank of gate and of up, r rank of a fused pair (2R for gate_up).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import Site, sites
from unfreeze.adapters.dora import Dora
from unfreeze.adapters.embeddings import embedding_adapter, entries_of_embeddings
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.names import check_per_expert, excluded, prefix_in, released, swapped, theirs
from unfreeze.adapters.readers import Drop, Layout, Reader
from unfreeze.adapters.tokens import entries_of_rows, indices_to_save, token_rows
from unfreeze.adapters.whole import entries_of_whole, modules_to_save, tied_whole, wholes
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.save import write_file, write_safetensors
from unfreeze.config.adapter import CONFIG, PREFIX, WEIGHTS
from unfreeze.core.errors import AdapterError
from unfreeze.kernels.expert_mlp import SWIGLU, Activation
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import REWRITTEN, candidates


@dataclass(frozen=True)
class Entry:
    """One pair of factors, as in a file.

    A [r, in] and B [out, r], or stacked A [E, r, in] and B [E, out, r]. The written form, `tensor`, has `pad`
    more ranks of zeros, and B times `factor`. m [out]: DoRA's lengths.
    """

    key: str  # name in the file between PREFIX and ".lora_A.weight"
    target: str  # full name for target_modules or target_parameters
    parameter: bool  # True: target_parameters
    site: str
    A: Tensor
    B: Tensor
    scale: float
    pad: int = 0
    factor: float = 1.0
    m: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.A.shape[-2] + self.pad

    @property
    def alpha(self) -> float:
        # scale was alpha / rank: undo the division's rounding
        return float(f"{self.scale * self.rank:.15g}")

    def tensor(self, half: str) -> Tensor:
        """A or B as written; stacked: flattened with the expert slowest in A and fastest in B. Or m."""
        if half == "m":
            assert self.m is not None
            return self.m.detach().contiguous()
        matrix = (self.A if half == "A" else self.B).detach()
        if half == "B" and self.factor != 1.0:
            matrix = (matrix.double() * self.factor).float()
        if self.pad:
            matrix = nn.functional.pad(matrix, (0, 0, 0, self.pad) if half == "A" else (0, self.pad))
        if matrix.dim() == 3:
            matrix = matrix.flatten(0, 1) if half == "A" else matrix.permute(1, 2, 0).flatten(1)
        return matrix.contiguous()


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file, each computed on access.

    All padded ones at once may take several times the memory of the adapter.
    """

    def __init__(self, entries: Sequence[Entry], prefix: str, whole: Mapping[str, Tensor] | None = None):
        ends = {"A": "lora_A.weight", "B": "lora_B.weight", "m": "lora_magnitude_vector"}
        self._of = {
            f"{PREFIX}{name_on_disk(prefix, entry.key)}.{end}": (entry, half)
            for entry in entries
            for half, end in ends.items()
            if half != "m" or entry.m is not None
        }
        self._whole = {f"{PREFIX}{name_on_disk(prefix, key)}": of for key, of in (whole or {}).items()}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._whole[name]
        entry, half = self._of[name]
        return entry.tensor(half)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._of, *self._whole])

    def __len__(self) -> int:
        return len(self._of) + len(self._whole)


def save_adapter(
    model: nn.Module,
    directory: str | Path,
    layout: Layout = "peft",
    base_name: str | None = None,
    *,
    prefix: str = "",
    reader: Reader | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the model's adapters as adapter_model.safetensors and adapter_config.json. -> the directory.

    Factors are float32; each file is written atomically, and a new folder is complete or absent. `base_name`
    goes into base_model_name_or_path. `prefix` is the one before the names of the checkpoint's text model
    (Manifest.prefix). `reader`: a program whose rules are followed (readers.py), including its layout.
    values: parameter name -> tensor to write in place of a weight that trains fully: its float32 master.

    Raises AdapterError if the model has no adapter, or none that the reader applies. Call
    verify.verify_adapter afterwards: it re-reads the file.
    """
    layout = reader.layout if reader else layout
    entries, config = entries_of(model, layout, base_name, reader)
    directory = Path(directory)
    tensors = Tensors(entries, prefix_in(model, prefix), dict(beside_lora(model, values)))
    new = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / WEIGHTS, tensors, {"format": "pt", "layout": layout})
        write_file(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError:
        if new:  # leave no empty folder, and no half adapter in a new one
            shutil.rmtree(new[-1], ignore_errors=True)
        raise
    return directory


def entries_of(
    model: nn.Module, layout: Layout = "peft", base_name: str | None = None, reader: Reader | None = None
) -> tuple[list[Entry], dict[str, Any]]:
    """(the pairs of the model's adapters under their names on disk, adapter_config.json)."""
    adapted = sites(model)
    if not adapted:
        raise AdapterError("there is no adapter to save: the model has none attached")
    if layout == "per-expert" and (token_rows(model) or embedding_adapter(model)):
        raise AdapterError(
            f"{reader.name if reader else 'this layout'} holds no adapter of embeddings or new tokens",
            next="unfreeze merge RUN --to bf16, and serve the merged folder",
        )
    if layout == "per-expert" and (whole := wholes(model)):
        raise AdapterError(
            f"{reader.name if reader else 'the per-expert layout'} holds LoRA alone, but {len(whole)} modules"
            f" trained fully; first: {next(iter(whole))}",
            next="unfreeze merge RUN --to bf16, and serve the merged folder",
        )
    if reader:
        left_out = dropped(model, reader)
        adapted = [site for site in adapted if site.name not in left_out]
        if not adapted:
            raise AdapterError(
                f"there is no adapter to save: {reader.name} applies none of {', '.join(left_out)}"
            )
    if layout == "per-expert":
        if any(isinstance(site.adapter, Dora) for site in adapted):
            raise AdapterError(
                f"{reader.name if reader else 'the per-expert layout'} reads no DoRA adapter",
                next="merge it: unfreeze merge RUN --to bf16; or --for peft",
            )
        entries = _uniform(_per_expert_entries(adapted, model, reader))
    else:
        entries = _peft_entries(adapted, model)
    config = _config(entries, layout, base_name, model)
    named = released if layout == "per-expert" else theirs
    return [replace(entry, key=named(model, entry.key)) for entry in entries], config


def beside_lora(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors beside LoRA's under transformers' names: modules that train fully, new tokens, embeddings."""
    yield from entries_of_whole(model, values)
    yield from entries_of_rows(model)
    yield from entries_of_embeddings(model)


def dropped(model: nn.Module, reader: Reader) -> dict[str, Drop]:
    """Name of a site -> the reason why the reader doesn't apply its adapter."""
    linear = [c.name for c in candidates(model) if isinstance(c.owner, Linear)]
    return reader.dropped([site.name for site in sites(model) if isinstance(site.owner, Linear)], linear)


def _per_expert_entries(adapted: list[Site], model: nn.Module, reader: Reader | None) -> list[Entry]:
    entries: list[Entry] = []
    for site in adapted:
        adapter = site.adapter
        if isinstance(adapter, LowRank):
            entries.append(Entry(site.name, site.name, False, site.name, *adapter.factors()))
            continue
        check_per_expert(model, site.name)
        pairs = projections(adapter)
        if reader and reader.experts_whole:
            pairs |= _zero_projections(pairs, (*adapter.names, "down_proj"))
        for projection, (A, B, scale) in pairs.items():
            names = [f"{site.name}.{e}.{projection}" for e in range(A.shape[0])]
            entries += [
                Entry(name, name, False, site.name, a, b, scale)
                for name, a, b in zip(names, A, B, strict=True)
            ]
    return entries + (_zero_siblings(entries, model, reader) if reader else [])


def _zero_siblings(entries: list[Entry], model: nn.Module, reader: Reader) -> list[Entry]:
    """Zero adapters for the linear layers that the reader fuses with adapted ones."""
    owners = {c.name: c.owner for c in candidates(model) if isinstance(c.owner, Linear)}
    known = {entry.site for entry in entries}
    entries_of_zeros: dict[str, Entry] = {}
    for entry in entries:
        parent, _, leaf = entry.site.rpartition(".")
        group = next((group for group in reader.together if leaf in group), ())
        for name in (f"{parent}.{other}" for other in group):
            if name in known or name in entries_of_zeros or name not in owners or entry.site not in owners:
                continue
            owner = owners[name]
            A, B = _zeros(entry.rank, owner.in_features), _zeros(owner.out_features, entry.rank)
            entries_of_zeros[name] = Entry(name, name, False, name, A, B, entry.scale)
    return list(entries_of_zeros.values())


def _zero_projections(
    there: Mapping[str, tuple[Tensor, Tensor, float]], every: tuple[str, ...]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """projection -> a pair of zeros for every expert, for projections without an adapter."""
    (A, B, scale), down = next(iter(there.values())), "down_proj" in there
    # D model width and I expert width, from the shapes of the existing pairs
    D, I = (B.shape[1], A.shape[2]) if down else (A.shape[2], B.shape[1])
    E, R = A.shape[:2]
    sizes = {name: (I, D) if name == "down_proj" else (D, I) for name in every}
    return {
        name: (_zeros(E, R, inner), _zeros(E, outer, R), scale)
        for name, (inner, outer) in sizes.items()
        if name not in there
    }


def _zeros(*sizes: int) -> Tensor:
    """One zero, expanded to the sizes."""
    return torch.zeros(()).expand(*sizes)


def _uniform(entries: list[Entry]) -> list[Entry]:
    """The same ΔW with one rank and one scale for all: the largest rank, and the most common scale.

    A lower rank is padded with zeros. Another scale s' becomes B · (s' / s), which rounds B once to float32
    (not at all if the ratio is a power of two).
    """
    rank = max(entry.rank for entry in entries)
    scale = Counter(entry.scale for entry in entries).most_common(1)[0][0]

    return [
        replace(entry, pad=rank - entry.rank, factor=entry.scale / scale, scale=scale) for entry in entries
    ]


def projections(adapter: ExpertLowRank) -> dict[str, tuple[Tensor, Tensor, float]]:
    """projection -> (A [E, R, in], B [E, out, R], scale) for each adapted projection; views."""
    result: dict[str, tuple[Tensor, Tensor, float]] = {}
    of = adapter.factors()
    if of.gate_up_A is not None and of.gate_up_B is not None:
        parts = len(adapter.names)
        pairs = zip(of.gate_up_A.chunk(parts, 1), of.gate_up_B.chunk(parts, 1), strict=True)
        result |= {name: (A, B, of.scale) for name, (A, B) in zip(adapter.names, pairs, strict=True)}
    if of.down_A is not None and of.down_B is not None:
        result["down_proj"] = (of.down_A, of.down_B, of.down_scale)
    return result


def _peft_entries(adapted: list[Site], model: nn.Module) -> list[Entry]:
    has_experts = any(isinstance(c.owner, Experts) for c in candidates(model))
    entries: list[Entry] = []
    for site in adapted:
        adapter = site.adapter
        if isinstance(adapter, LowRank):
            # the same tensors under the same names, and peft does not rewrite a parameter
            as_parameter = has_experts and site.name.endswith(REWRITTEN)
            target = f"{site.name}.weight" if as_parameter else site.name
            m = adapter.m if isinstance(adapter, Dora) else None
            entries.append(Entry(site.name, target, as_parameter, site.name, *adapter.factors(), m=m))
            continue
        of = adapter.factors()
        both = of.gate_up_A is not None and of.down_A is not None
        if of.gate_up_A is not None and of.gate_up_B is not None:
            assert isinstance(site.owner, Experts)
            B = block_diagonal(of.gate_up_B, site.owner.activation)
            # peft nests one wrapper per parameter; gate_up is the inner one
            key = f"{site.name}.base_layer" if both else site.name
            entries.append(
                Entry(key, f"{site.name}.{site.owner.first}", True, site.name, of.gate_up_A, B, of.scale)
            )
        if of.down_A is not None and of.down_B is not None:
            entries.append(
                Entry(
                    site.name, f"{site.name}.down_proj", True, site.name, of.down_A, of.down_B, of.down_scale
                )
            )
    if swapped(model):
        entries = [
            replace(entry, A=entry.B.mT, B=entry.A.mT) if entry.A.dim() == 3 else entry for entry in entries
        ]
    return _padded(entries)


def block_diagonal(gate_up_B: Tensor, activation: Activation = SWIGLU) -> Tensor:
    """[E, 2I, R] -> [E, 2I, 2R]: gate's rows use the first R columns, up's the last R.

    So B · [A_gate; A_up] is ΔW / scale, with rows in `activation`'s order, as in the base. Without a gate it
    is B itself.
    """
    if len(activation.projections) == 1:
        return gate_up_B.detach()
    gate, up = gate_up_B.detach().chunk(2, dim=1)
    E, width, R = gate_up_B.shape
    blocks = gate_up_B.new_zeros((E, width, 2 * R))
    of_gate, of_up = activation.split(blocks, 1)
    of_gate[..., :R], of_up[..., R:] = gate, up
    return blocks


def _padded(entries: list[Entry]) -> list[Entry]:
    """Zero-pad to the default rank the parameter pairs that would otherwise need a rank_pattern (_config).

    peft honours rank_pattern for parameters, but warns that it "was ignored" unless the same key matches a
    module too. Zeros mean the same without the warning.
    """
    default = _default(entries)
    in_modules = {(entry.rank, entry.alpha) for entry in entries if not entry.parameter}

    def pad(entry: Entry) -> Entry:
        more = default.rank - entry.rank
        named_anyway = (entry.rank, entry.alpha) in in_modules
        if not entry.parameter or more <= 0 or entry.scale != default.scale or named_anyway:
            return entry
        return replace(entry, pad=more)

    return [pad(entry) for entry in entries]


def _default(entries: list[Entry]) -> Entry:
    """The entry whose rank and alpha become `r` and `lora_alpha`.

    The fused gate_up if there is one, else the most common.
    """
    for entry in entries:
        if entry.parameter and entry.A.dim() == 3 and not entry.target.endswith(".down_proj"):
            return entry
    commonest = Counter((entry.rank, entry.alpha) for entry in entries).most_common(1)[0][0]
    return next(entry for entry in entries if (entry.rank, entry.alpha) == commonest)


def _config(entries: list[Entry], layout: Layout, base_name: str | None, model: nn.Module) -> dict[str, Any]:
    """adapter_config.json with the fields peft reads."""
    default = _default(entries)
    if layout == "per-expert":
        names = {entry.target: released(model, entry.target).rsplit(".", 1)[-1] for entry in entries}
    else:
        names = _short_names(entries, model)
    rank_pattern, alpha_pattern = _patterns(entries, names, default)
    for name, table in embedding_adapter(model).items():  # its rank or scale may be another: twice is PiSSA's
        leaf = theirs(model, name).rsplit(".", 1)[-1]
        if table.rank != default.rank:
            rank_pattern[leaf] = table.rank
        if table.alpha != default.alpha:
            alpha_pattern[leaf] = table.alpha
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": default.rank,
        "lora_alpha": default.alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(
            {names[e.target] for e in entries if not e.parameter}
            | {theirs(model, name).rsplit(".", 1)[-1] for name in embedding_adapter(model)}
        ),
        "target_parameters": sorted({names[e.target] for e in entries if e.parameter}) or None,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": modules_to_save(model) or None,
    }
    if any(entry.m is not None for entry in entries):
        config["use_dora"] = True
    if indices := indices_to_save(model):
        config["trainable_token_indices"] = indices
    if tied_whole(model):
        config["ensure_weight_tying"] = True  # else peft trains embeddings and head apart
    if beside := excluded(model):
        config["exclude_modules"] = beside
    if layout == "per-expert" and any(_expert_number(e.target) for e in entries):
        config["layout"] = layout
    return config


def _patterns(
    entries: list[Entry], names: Mapping[str, str], default: Entry
) -> tuple[dict[str, int], dict[str, float]]:
    """rank_pattern and alpha_pattern of the entries that differ from the default.

    A key is a regular expression on the end of a name.
    """
    groups: dict[tuple[int, float], dict[str, bool]] = {}
    for entry in entries:
        if (entry.rank, entry.alpha) != (default.rank, default.alpha):
            groups.setdefault((entry.rank, entry.alpha), {})[names[entry.target]] = entry.parameter
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for (rank, alpha), members in groups.items():
        keys = ["|".join(members)] if any(members.values()) else list(members)
        ranks.update((key, rank) for key in keys if rank != default.rank)
        alphas.update((key, alpha) for key in keys if alpha != default.alpha)
    return ranks, alphas


def _short_names(entries: list[Entry], model: nn.Module) -> dict[str, str]:
    """target -> its shortest suffix that matches no unadapted weight, and none of other rank or alpha."""
    groups = {entry.target: (entry.rank, entry.alpha) for entry in entries}
    names = [p for c in candidates(model) for p in c.projections]
    universe = {name: groups.get(name) for n in names for name in (n, f"{n}.weight")}
    universe = {theirs(model, name): group for name, group in universe.items()}
    short: dict[str, str] = {}
    for target, group in groups.items():
        parts = theirs(model, target).split(".")
        # "mlp.experts.down_proj", not "down_proj"
        least = 3 if "experts" in parts else 2 if parts[-1] == "weight" else 1
        ends = (".".join(parts[-length:]) for length in range(min(least, len(parts)), len(parts) + 1))
        short[target] = next(
            end for end in ends if all(g == group for n, g in universe.items() if f".{n}".endswith(f".{end}"))
        )
    return short


def _expert_number(target: str) -> bool:
    """True if this is "….experts.17.up_proj"."""
    parts = target.split(".")
    return len(parts) > 2 and parts[-3] == "experts" and parts[-2].isdigit()
