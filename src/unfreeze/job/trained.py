"""The trained part of a run and how it is written: adapters on a frozen base, or every weight.

A recipe names one of the two; job.run treats both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze import models
from unfreeze.checkpoint.beside import files_beside
from unfreeze.config.adapter import INDEX, adapter_folder
from unfreeze.config.training import portable
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.core.units import format_bytes, format_count
from unfreeze.job import merge_aware
from unfreeze.job.end.card import write_beside
from unfreeze.job.end.written import set_aside
from unfreeze.job.merge_aware import MergeAware

if TYPE_CHECKING:
    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import Manifest
    from unfreeze.core.layout import Layout
    from unfreeze.generate.new_tokens import NewTokens
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan import Plan, PlannedModel
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.parallel.processes.mesh import Mesh
    from unfreeze.train.balance import AfterUpdate
    from unfreeze.train.state import State

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
)
ADAPTERS = "--train adapters (sft, prefer, distill)"  # suggested if weights cannot be trained


class Adapters:
    """LoRA adapters, written to <out>/adapter, also on interruption: they are small and `chat` can use them.

    strict True: a matrix without the expected gradient in the first step stops the run.
    """

    name, marker, strict, when_interrupted = "adapter", "adapter_config.json", True, True
    new = False

    def __init__(self, lora: LoraConfig, seed: int):
        self.lora = lora
        self._seed = seed
        # suffix of the plan's line: where the adapters' first values come from, and how they train
        self.begins = merge_aware.begins(lora)
        self.added: NewTokens | None = None  # set when the tokenizer is opened (job/opening/added.py)

    def check(self, manifest: Manifest) -> None:
        """Accept any model: adapters work with packed weights too.

        Raises ConfigError for a merge_aware format that a merge cannot write.
        """
        if self.lora.merge_aware:
            merge_aware.check(self.lora, manifest)

    def check_plan(self, plan: Plan, manifest: Manifest) -> None:
        """Raise ConfigError for a plan that cannot be trained with."""
        if self.lora.merge_aware:
            merge_aware.check_plan(plan, manifest)
        self._check_start(plan.layout)
        self._check_beside(plan.layout)

    def hooks(self, manifest: Manifest) -> list[MergeAware]:
        """Hooks before all others, after each step and, by `first`, before the session's first."""
        return [MergeAware(self.lora, manifest)] if self.lora.merge_aware else []

    def planned(self, model: PlannedModel) -> PlannedModel:
        """The model that the plan counts: with the rows of new tokens and what merge-aware training takes."""
        model = merge_aware.planned(self.lora, model) if self.lora.merge_aware else model
        if self.added is None:
            return model
        from dataclasses import replace

        from unfreeze.models.vocabulary import refuse_vocabulary

        refuse_vocabulary(model.meta)
        matrices = 1 if model.shape.tied else 2
        whole, rows = model.sizes.whole, matrices * len(self.added.ids) * model.shape.hidden_size
        grown = max(0, self.added.size - model.shape.vocab_size)
        more = grown * matrices * model.shape.hidden_size * model.sizes.compute_bytes
        whole = replace(whole, elements=whole.elements + rows)
        return replace(model, sizes=replace(model.sizes, whole=whole, base=model.sizes.base + more))

    def _check_beside(self, layout: Layout) -> None:
        """Raise ConfigError for a layout in which modules cannot train fully beside the adapters."""
        spread = {
            "split": layout.sharing > 1,
            "weights": layout.sharded,
            "rest": layout.rest != "device",
            "adapters": layout.adapters != "device",
        }
        field = next((name for name, on in spread.items() if on), "")
        if field and (self.lora.train_too or self.lora.new_tokens):
            name = "train_too" if self.lora.train_too else "new_tokens"
            raise ConfigError(
                f"lora.{name} needs modules whole in every process, but the plan spreads them: place.{field}",
                next=f"--place.{field} {1 if field == 'split' else 'device'}, or leave lora.{name} out",
            )

    def attach(self, model: Decoder, *, quiet: bool = False, restored: bool = False) -> None:
        """Put the adapters on the model. restored: a save is copied into them afterwards."""
        from unfreeze.adapters import attach
        from unfreeze.adapters.tokens import train_new_tokens
        from unfreeze.tracking.live import LoadProgress

        if self.added is not None:
            train_new_tokens(model, self.added.ids, self.added.parts, self.added.size)
        with LoadProgress("singular values", quiet=quiet) as progress:
            attach(model, self.lora, self._seed, progress=progress, restored=restored)

    def _check_start(self, layout: Layout) -> None:
        """Raise ConfigError for a layout in which the weights that the adapters start from cannot be read."""
        if not self.lora.reads_weights:
            return
        name = f"lora.start = {self.lora.start}" if self.lora.start != "lora" else "lora.dora"
        places = {"place.rest": (layout.rest, "device")}
        if self.lora.start != "lora":
            places |= {"place.experts": (layout.experts, "device"), "place.split": (layout.sharing, 1)}
        for field, (value, needed) in places.items():
            if value != needed:
                raise ConfigError(
                    f"{name} starts from whole weights, and {field} = {value} leaves some elsewhere",
                    next=f"--{field} {needed}, or without {name.partition(' ')[0]}",
                )

    def agree(self, model: Decoder, group: Group) -> None:
        """Give all processes the first one's values: computed from W, they may differ in a last bit."""
        if self.lora.reads_weights and group.size > 1:
            from unfreeze.adapters import adapter_parameters
            from unfreeze.adapters.pissa import starts

            tensors = [parameter.detach() for _, parameter in adapter_parameters(model)]
            for tensor in (*tensors, *(buffer for _, start in starts(model) for buffer in start.buffers())):
                group.broadcast(tensor, 0)

    def after_update(self, model: Decoder) -> Sequence[AfterUpdate]:
        """Tensors that every save of a run keeps beside the trained ones."""
        from unfreeze.adapters.pissa import KeptStarts

        return [KeptStarts(model)] if self.lora.start != "lora" else []

    def written_bytes(self, manifest: Manifest, adapter: int) -> int:
        """Most bytes that `write` leaves on disk. adapter: the plan's bytes.

        peft's fused pairs of routed experts have zeros beside the blocks of gate and up, and beside down's
        rank (adapters/layouts.py). The zeros can double the size.
        """
        grown = 2 if self.lora.start != "lora" else 1  # the rank on disk
        return adapter * grown * (2 if models.shape(manifest.config).num_experts else 1)

    def write(self, state: State, manifest: Manifest, model_name: str, mesh: Mesh, folder: Path) -> None:
        """Write the adapter, read it back and compare.

        With expert parallelism each process writes its own experts.
        """
        from unfreeze.adapters import save_adapter, verify_adapter
        from unfreeze.adapters.shards import remove_shards, save_index, save_shard

        model, base, prefix = state.model, portable(model_name), manifest.prefix
        values, rounded = state.optimizer.masters, merge_aware.trained_as(state.model, self.lora)

        def beside(place: Path) -> None:
            merge_aware.write_rounded(place, rounded)
            write_beside(place, manifest, base, state.run.path, TOKENIZER_FILES, rounded=rounded)

        def whole() -> None:
            save_adapter(model, folder, base_name=base, prefix=prefix, values=values)
            verify_adapter(model, folder, values=values)
            remove_shards(folder)
            beside(folder)

        if mesh.split == 1:
            mesh.all.on_rank0(whole)
            return
        shared = (state.run.path / "state").resolve().parent / folder.name  # a follower's folder is its own

        def part() -> None:
            if mesh.data.rank == 0:
                save_shard(model, shared, mesh.experts.rank, mesh.split, prefix)

        def index() -> None:
            sizes = [len(mesh.rows_of(place)) for place in range(mesh.split)]
            save_index(model, shared, sizes, base, prefix)
            beside(shared)

        # remove the index first, so that shards of two steps are never read as one adapter
        mesh.all.on_rank0(lambda: (shared / INDEX).unlink(missing_ok=True))
        mesh.all.meet(part)
        mesh.all.on_rank0(index)

    def as_result(self, folder: Path) -> dict[str, Any]:
        """Fields for finish()."""
        return {"export": True}


class Continued(Adapters):
    """Adapters that start from a folder's, with its ranks, scales and targets. The optimizer starts fresh."""

    def __init__(self, lora: LoraConfig, seed: int, source: str):
        super().__init__(lora, seed)
        self.source = source
        self.begins = f", continued from {source}{self.begins}"

    def attach(self, model: Decoder, *, quiet: bool = False, restored: bool = False) -> None:
        from unfreeze.adapters import load_adapter
        from unfreeze.adapters.read import untrainable

        load_adapter(model, adapter_folder(self.source))
        if zero := untrainable(model):
            leaves = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in zero))
            raise AdapterError(
                f"{self.source}: A and B of {len(zero):,} of its matrices ({leaves}) are all zeros, which no"
                " gradient can change. Exports for vLLM or SGLang contain such pairs",
                next="give --adapter the run itself, or its export for peft",
            )


class AllWeights:
    """Every parameter, written once at the end to <out>/model, in the format that config.json declares.

    Each tensor keeps the checkpoint's dtype, rounded once, from the float32 master weights if there are any.
    Tensors outside the language model (multi-token prediction heads, a vision tower) are copied byte for
    byte, untrained; and so are the files beside the weights (tokenizer, image processor, licence).
    An MoE router's selection bias is not a parameter: only the load balancing of `pretrain` changes it.

    indexer: True if indexers of sparse attention train too; else they are frozen.
    new: True for a new model, whose folder gave its tokenizer alone: no other file of it is copied.

    strict False: a matrix without a gradient in the first step is only a warning, because a run of days
    should not stop for one expert.
    """

    name, marker, strict, when_interrupted = "model", "config.json", False, False
    begins = ""
    lora: LoraConfig | None = None

    def __init__(self, *, indexer: bool = False, new: bool = False):
        self._indexer, self.new = indexer, new

    def check(self, manifest: Manifest) -> None:
        """Raise ConfigError for a model that cannot be trained in full and written back.

        That is: a text model nested in a larger one of which there are no weights, packed weights, or a dtype
        that torch doesn't have.
        """
        if "text_config" in manifest.config and not manifest.tensors:
            raise ConfigError(
                f"{manifest.path}: config.json nests its language model in text_config, and there are no"
                " weights of the parts around it",
                next="give a folder with the model's weights, or one whose config.json is that text_config",
            )
        if manifest.is_packed():
            raise ConfigError(
                f"{manifest.path} is packed{_formats(manifest)}; gradients cannot change"
                f" its codes{_expanded(manifest)}",
                next=f"{ADAPTERS}, which leaves the codes unchanged",
            )

        from unfreeze.checkpoint.tensors import TORCH_DTYPE

        strange = [info for info in manifest.tensors.values() if info.dtype not in TORCH_DTYPE]
        if strange:
            raise ConfigError(
                f"{manifest.path}: {strange[0].name} is {strange[0].dtype}, which cannot be written back",
                next=ADAPTERS,
            )

    def check_plan(self, plan: Plan, manifest: Manifest) -> None:
        """Accept any plan."""

    def hooks(self, manifest: Manifest) -> list[MergeAware]:
        """No hooks before the others."""
        return []

    def planned(self, model: PlannedModel) -> PlannedModel:
        """The model that the plan counts: as it is, every weight trains."""
        return model

    def attach(self, model: Decoder, *, quiet: bool = False, restored: bool = False) -> None:
        """Let indexers train, if they should: the other parameters already require gradients."""
        if self._indexer:
            from unfreeze.models.indexers import train_indexers

            train_indexers(model)

    def agree(self, model: Decoder, group: Group) -> None:
        """All processes read the same files."""

    def after_update(self, model: Decoder) -> Sequence[AfterUpdate]:
        """Nothing beside the trained tensors."""
        return []

    def written_bytes(self, manifest: Manifest, adapter: int) -> int:
        """Bytes that `write` leaves on disk: those of the checkpoint. adapter: unused, 0."""
        return manifest.nbytes

    def write(self, state: State, manifest: Manifest, model_name: str, mesh: Mesh, folder: Path) -> None:
        """Write the checkpoint with config and tokenizer files, atomically.

        Sharded weights: all processes write.

        If the run is killed, the folder is complete or absent.
        """
        extra = files_beside(manifest.path)
        if self.new:
            extra = {name: file for name, file in extra.items() if name in TOKENIZER_FILES}
        if not state.model.sharded:
            mesh.all.on_rank0(lambda: self._write(state, manifest, folder, extra))
            return
        from unfreeze.job.end.divided import write_divided

        shared = (state.run.path / "state").resolve().parent / folder.name  # a follower's folder is its own
        mesh.all.on_rank0(lambda: self._make_room(shared))
        write_divided(state, manifest, shared, mesh.all, extra)

    def _write(self, state: State, manifest: Manifest, folder: Path, extra: dict[str, Path]) -> None:
        from unfreeze.checkpoint import save_checkpoint
        from unfreeze.models.publish import carried, named_as_stored, published, stored_dtypes

        model = state.model
        self._make_room(folder)
        dtypes = stored_dtypes(model, manifest)
        trained = published(model, manifest.config, dtypes=dtypes, values=state.optimizer.masters)
        tensors = chain(named_as_stored(model, manifest, trained), carried(model, manifest))
        save_checkpoint(folder, manifest.config, tensors, extra=extra)

    def _make_room(self, folder: Path) -> None:
        """Remove the checkpoint of an earlier step, left before the run was extended."""
        if (folder / self.marker).is_file():
            set_aside(folder)

    def as_result(self, folder: Path) -> dict[str, Any]:
        """Fields for finish()."""
        return {"model": str(folder)}


Trained = Adapters | AllWeights


def _formats(manifest: Manifest) -> str:
    """Format " (NAME)" of the packed weights, from config.json; "" if there is none."""
    scheme = manifest.scheme()
    return f" ({scheme.name})" if scheme is not None else ""


def _expanded(manifest: Manifest) -> str:
    """Words on the memory to train the weights in full, expanded to bfloat16, by the plan's arithmetic."""
    from dataclasses import replace

    import torch

    from unfreeze import models
    from unfreeze.core.layout import RESIDENT
    from unfreeze.parallel.machine import hardware
    from unfreeze.parallel.plan import Work, measure_sizes, plan

    sizes = measure_sizes(models.meta_model(models.shape(manifest.config), manifest, torch.bfloat16), None)
    weights = sizes.expanded // sizes.compute_bytes
    expanded = replace(sizes, base=sizes.expanded, elements=weights)
    terms = plan(expanded, RESIDENT, Work(tokens=1), hardware(torch.device("cpu"))).terms
    parts = {
        "weights": terms["base"],
        "gradients": terms["gradients"],
        "float32 masters and moments": terms["optimizer"],
    }
    return (
        f". {format_bytes(sizes.base)} now; expanded to bfloat16 and trained in full, {format_count(weights)}"
        f" weights take {format_bytes(sum(parts.values()))}: "
        + " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    )
