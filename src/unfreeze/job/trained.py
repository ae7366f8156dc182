"""What a run trains and leaves behind: adapters beside a frozen base, or every weight.

A recipe names one of the two; job.run doesn't ask which.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze import models
from unfreeze.config.adapter import INDEX, adapter_folder
from unfreeze.config.training import portable
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.core.units import format_bytes, format_count
from unfreeze.job.end.card import write_beside
from unfreeze.job.end.written import set_aside

if TYPE_CHECKING:
    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder
    from unfreeze.parallel.processes.mesh import Mesh
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
ADAPTERS = "--train adapters (sft, prefer, distill)"  # where weights cannot be trained


class Adapters:
    """LoRA factors, written to <out>/adapter; at an interruption too: they are small, and chat takes them.

    strict True: a matrix that got no gradient in the first step, though one was due, ends the run.
    """

    name, marker, strict, when_interrupted = "adapter", "adapter_config.json", True, True
    begins = ""  # how they begin, for the plan's line

    def __init__(self, lora: LoraConfig, seed: int):
        self.lora = lora
        self._seed = seed

    def check(self, manifest: Manifest) -> None:
        """Adapters go beside every weight, packed or not."""

    def attach(self, model: Decoder) -> None:
        from unfreeze.adapters import attach

        attach(model, self.lora, self._seed)

    def written_bytes(self, manifest: Manifest, adapter: int) -> int:
        """What `write` leaves on the disk at most; `adapter` is the plan's.

        peft's fused pairs of routed experts hold zeros beside gate's and up's blocks, and beside down's rank
        (adapters/layouts.py): up to as many as numbers.
        """
        return adapter * (2 if models.shape(manifest.config).num_experts else 1)

    def write(self, state: State, manifest: Manifest, model_name: str, mesh: Mesh, folder: Path) -> None:
        """The adapter, read again and compared. Of split experts each process writes and compares its own."""
        from unfreeze.adapters import save_adapter, verify_adapter
        from unfreeze.adapters.shards import remove_shards, save_index, save_shard

        model, base, prefix = state.model, portable(model_name), manifest.prefix

        def whole() -> None:
            verify_adapter(model, save_adapter(model, folder, base_name=base, prefix=prefix))
            remove_shards(folder)
            write_beside(folder, manifest, base, state.run.path, TOKENIZER_FILES)

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
            write_beside(shared, manifest, base, state.run.path, TOKENIZER_FILES)

        # without an index there are no shards: those of two steps are never read as one adapter
        mesh.all.on_rank0(lambda: (shared / INDEX).unlink(missing_ok=True))
        mesh.all.meet(part)
        mesh.all.on_rank0(index)

    def as_result(self, folder: Path) -> dict[str, Any]:
        """For finish(): what a run's result names."""
        return {"export": True}


class Continued(Adapters):
    """Adapters that begin as a folder's, with its ranks, scales and places. The optimizer begins anew."""

    def __init__(self, lora: LoraConfig, seed: int, source: str):
        super().__init__(lora, seed)
        self.source = source
        self.begins = f", going on from {source}"

    def attach(self, model: Decoder) -> None:
        from unfreeze.adapters import load_adapter
        from unfreeze.adapters.read import untrainable

        load_adapter(model, adapter_folder(self.source))
        if zero := untrainable(model):
            leaves = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in zero))
            raise AdapterError(
                f"{self.source}: A and B of {len(zero):,} of its matrices ({leaves}) are zeros only, which no"
                " gradient can change. An export for vLLM or SGLang has such beside what was trained",
                next="--adapter with the run itself, or with its export for peft",
            )


class AllWeights:
    """Every parameter, written to <out>/model as a checkpoint in the format its config.json declares.

    It is written once, when training is done.
    Each tensor has the dtype that the checkpoint had it in, rounded once, from the float32 masters where
    there are such. What is no part of the language model (heads for later tokens) is copied byte for byte,
    untrained.
    An MoE router's selection bias is no parameter: only the balancing of `pretrain` moves it.

    strict False: a matrix that got no gradient in the first step is a warning. Nobody asked for it by name,
    and a run of days should not end for one expert.
    """

    name, marker, strict, when_interrupted = "model", "config.json", False, False
    begins = ""
    lora: LoraConfig | None = None

    def check(self, manifest: Manifest) -> None:
        """Raise ConfigError for what cannot be trained in full and written back.

        That is: a text model nested in a larger one, packed weights, a dtype that torch doesn't have.
        """
        if "text_config" in manifest.config:
            raise ConfigError(
                f"{manifest.path}: config.json nests its language model in text_config; only plain language"
                " models are written whole",
                next=(f"{ADAPTERS}, or give a folder whose config.json is that text_config"),
            )
        if manifest.is_packed():
            raise ConfigError(
                f"{manifest.path} is packed{_formats(manifest)}; its codes cannot be moved by"
                f" gradients{_expanded(manifest)}",
                next=f"{ADAPTERS}, which leaves the codes as they are",
            )

        from unfreeze.checkpoint.tensors import TORCH_DTYPE

        strange = [info for info in manifest.tensors.values() if info.dtype not in TORCH_DTYPE]
        if strange:
            raise ConfigError(
                f"{manifest.path}: {strange[0].name} is {strange[0].dtype}, which cannot be written back",
                next=ADAPTERS,
            )

    def attach(self, model: Decoder) -> None:
        """Nothing: a model's parameters require gradients as they are."""

    def written_bytes(self, manifest: Manifest, adapter: int) -> int:
        """What `write` leaves on the disk: as much as the checkpoint has. `adapter` is the plan's, 0."""
        return manifest.nbytes

    def write(self, state: State, manifest: Manifest, model_name: str, mesh: Mesh, folder: Path) -> None:
        """The checkpoint with config and tokenizer files, in one move; of divided weights all write a part.

        A kill leaves all of it or nothing, so one that is there is whole.
        """
        extra = {name: manifest.path / name for name in TOKENIZER_FILES if (manifest.path / name).is_file()}
        if not state.model.sharded:
            mesh.all.on_rank0(lambda: self._write(state, manifest, folder, extra))
            return
        from unfreeze.job.end.divided import write_divided

        shared = (state.run.path / "state").resolve().parent / folder.name  # a follower's folder is its own
        mesh.all.on_rank0(lambda: self._make_room(shared))
        write_divided(state, manifest, shared, mesh.all, extra)

    def _write(self, state: State, manifest: Manifest, folder: Path, extra: dict[str, Path]) -> None:
        from unfreeze.checkpoint import save_checkpoint
        from unfreeze.checkpoint.nested import name_on_disk
        from unfreeze.checkpoint.tensors import stored_tensor
        from unfreeze.models.publish import carried, published, stored_dtypes

        model = state.model
        self._make_room(folder)
        dtypes = stored_dtypes(model, manifest)
        trained = published(model, manifest.config, dtypes=dtypes, values=state.optimizer.masters)
        named = ((name_on_disk(manifest.prefix, name), tensor) for name, tensor in trained)
        beside = ((info.name, stored_tensor(info)) for info in carried(model, manifest))
        save_checkpoint(folder, manifest.config, chain(named, beside), extra=extra)

    def _make_room(self, folder: Path) -> None:
        """Remove the checkpoint of an earlier step, of a run that went on for longer."""
        if (folder / self.marker).is_file():
            set_aside(folder)

    def as_result(self, folder: Path) -> dict[str, Any]:
        """For finish(): what a run's result names."""
        return {"model": str(folder)}


Trained = Adapters | AllWeights


def _formats(manifest: Manifest) -> str:
    """ " (FORMAT, FORMAT)": what config.json says the weights are packed in."""
    scheme = manifest.scheme()
    return f" ({scheme.name})" if scheme is not None else ""


def _expanded(manifest: Manifest) -> str:
    """What the weights would take expanded to bfloat16 and trained in full, as the plan counts it."""
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
