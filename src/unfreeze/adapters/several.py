"""Several adapters of one model at once: every sequence of a pass has its own, or none.

An adapter has a name and, over time, versions. A new version is loaded beside the old one and taken up by one
assignment; an answer keeps the version it began with, which is freed when its last answer has ended.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from unfreeze.adapters.attach import attached, detach, sites
from unfreeze.adapters.dora import Dora
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.read import read_adapter
from unfreeze.config.adapter import CONFIG, adapter_folder, longer_of, rounded_as
from unfreeze.core.errors import AdapterError, UserError, nearest
from unfreeze.core.longer import Longer
from unfreeze.kernels.decode_step.slots import NONE, Factors, SlotTable
from unfreeze.models import Decoder
from unfreeze.models.blocks.each import ExpertAdapters, LinearAdapters
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import candidates
from unfreeze.untrusted.json_object import read_object

SLOTS = 8  # of a new table; it grows

Adapters = Mapping[str, LowRank | ExpertLowRank]
"""By the names of their sites."""


@dataclass(frozen=True)
class Version:
    """An adapter as it was loaded once; two that are equal are the same."""

    name: str
    number: int
    slot: int = field(default=NONE, compare=False, repr=False)


AS_IT_IS = Version("", 0)
"""The model without an adapter."""


class Several:
    """The adapters of a model, by name; "" is the model without any.

        base    name of the model, as in base_model_name_or_path: an adapter of another is refused. "": any
        longer  scaling of positions that the model was opened with (rope.json beside an adapter)
        name    of the adapter that the model has attached, if it has one: it becomes the first

    Other threads may load, replace and drop while one generates. That one calls `assign` before each pass.
    Raises AdapterError for a model whose experts are split over processes.
    """

    def __init__(self, model: Decoder, base: str = "", *, longer: Longer | None = None, name: str = ""):
        self.model, self.base, self.longer = model, base, longer
        self._lock = threading.Lock()
        self._now: dict[str, Version] = {}
        self._held: dict[Version, int] = {}  # answers that run
        self._old: set[Version] = set()  # no longer the present one, but held
        self._number = 0
        if model.exchanges:
            raise AdapterError("several adapters at once need a model that one process holds")
        others = attached(model).keys() - {site.name for site in sites(model)}
        if others:
            raise AdapterError(
                f"{len(others)} modules train in another way beside the adapter, first {min(others)}: several"
                " adapters at once are LoRA alone",
                next="serve it by itself, or: unfreeze merge RUN --to bf16",
            )
        if present := {site.name: site.adapter for site in sites(model)}:
            self._take_up(name, present)  # first: what it refuses stays attached
            detach(model)

    # --- adapters

    @property
    def names(self) -> list[str]:
        """Names that can be asked for, in the order of loading."""
        return list(self._now)

    def load(self, name: str, folder: str | Path) -> Version:
        """Load the adapter of a run or folder under a new name.

        Raises AdapterError as `load_adapter` does, for an adapter of another base, and for a name in use.
        """
        self._free_name(name)
        return self._take_up(name, self._read(name, folder), self._free_name)

    def replace(self, name: str, folder: str | Path) -> Version:
        """Load a new version: answers that begin from now on have it, those that run keep the old one.

        Raises as `load`, and UserError for an unknown name; the old version then stays.
        """
        self._known(name)
        return self._take_up(name, self._read(name, folder), self._known)

    def put(self, name: str, adapters: Adapters) -> Version:
        """Take up a copy of adapters in memory, such as those that train, under a name, new or not.

        Raises AdapterError if one does not fit its layer.
        """
        for place, adapter in adapters.items():
            if wrong := _misfit(self.model.get_submodule(place), adapter):
                raise AdapterError(f"adapter {name!r} does not fit this model: {place} {wrong}")
        return self._take_up(name, copy.deepcopy(dict(adapters)))

    def _take_up(
        self, name: str, adapters: Adapters, check: Callable[[str], None] = lambda name: None
    ) -> Version:
        if any(isinstance(adapter, Dora) for adapter in adapters.values()):
            raise AdapterError(
                f"adapter {name!r} is DoRA, which scales the model's own rows: it cannot be one of several",
                next="serve it by itself, or merge it: unfreeze merge RUN --to bf16",
            )
        if not name:
            raise AdapterError("an adapter needs a name; the empty one is that of the model as it is")
        with self._lock:
            check(name)
            taken = {version.slot for version in (*self._now.values(), *self._old)}
            self._number += 1
            new = Version(name, self._number, next(i for i in range(len(taken) + 1) if i not in taken))
            self._fill(new.slot, adapters)
            old = self._now.get(name)
            self._now[name] = new
            self._retire(old)
        return new

    def drop(self, name: str) -> None:
        """Forget an adapter; answers that run keep it. Raises UserError for an unknown name."""
        with self._lock:
            self._known(name)
            self._retire(self._now.pop(name))

    # --- answers

    def version(self, name: str) -> Version:
        """The present version of that name, held until `leave`. Raises UserError for an unknown name."""
        with self._lock:
            if not name:
                return AS_IT_IS
            self._known(name)
            version = self._now[name]
            self._held[version] = self._held.get(version, 0) + 1
            return version

    def leave(self, version: Hashable) -> None:
        """An answer that held this version has ended; an old version is freed with its last one."""
        with self._lock:
            if not isinstance(version, Version) or version not in self._held:
                return
            self._held[version] -= 1
            if not self._held[version]:
                del self._held[version]
                if version in self._old:
                    self._old.remove(version)
                    self._free(version.slot)

    def assign(self, versions: Sequence[Hashable]) -> None:
        """Set the version of each sequence of the next pass, in its order."""
        self.model.assigned.assign([v.slot if isinstance(v, Version) else NONE for v in versions])

    # --- parts

    def _free_name(self, name: str) -> None:
        if name in self._now:
            raise AdapterError(f"there is an adapter {name!r} already", next="choose another name")

    def _known(self, name: str) -> None:
        if name not in self._now:
            known = ", ".join(self._now) or "none is loaded"
            raise UserError(
                f"there is no adapter {name!r}{nearest(name, self._now)}", next=f"one of: {known}"
            )

    def _read(self, name: str, folder: str | Path) -> Adapters:
        folder = adapter_folder(folder)
        of = read_object(folder / CONFIG, AdapterError).get("base_model_name_or_path")
        if self.base and isinstance(of, str) and of and not same_base(of, self.base):
            theirs, ours = Path(of).name, Path(self.base).name
            raise AdapterError(
                f"adapter {name!r} was trained on {theirs:.80}; this model is {ours:.80}",
                next=f"serve it on its own base, {of:.200}",
            )
        if rounded_as(folder) is not None:
            raise AdapterError(
                f"adapter {name!r} was trained through the rounding of a merge: it cannot be one of several",
                next="serve it by itself, or merge it: unfreeze merge RUN",
            )
        if longer_of(folder) != self.longer:
            raise AdapterError(
                f"adapter {name!r} was trained with other positions than this model has (rope.json)",
                next="serve it by itself",
            )
        try:
            return read_adapter(self.model, folder)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error.message}", next=error.next) from error

    def _fill(self, slot: int, adapters: Adapters) -> None:
        """Put the factors where the layers read them. No sequence has this slot yet."""
        assigned, news = self.model.assigned, False
        for place, adapter in adapters.items():
            owner = self.model.get_submodule(place)
            news |= owner.each is None
            if isinstance(adapter, LowRank):
                assert isinstance(owner, Linear)
                each = owner.each or LinearAdapters(assigned, SlotTable(SLOTS))
                news |= each.table.put(slot, _factors(*adapter.factors()))
                owner.each = each
            else:
                assert isinstance(owner, Experts)
                each = owner.each or ExpertAdapters(assigned, SlotTable(SLOTS), SlotTable(SLOTS))
                of = adapter.factors()
                if of.gate_up_A is not None and of.gate_up_B is not None:
                    news |= each.gate_up.put(slot, _factors(of.gate_up_A, of.gate_up_B, of.scale))
                if of.down_A is not None and of.down_B is not None:
                    news |= each.down.put(slot, _factors(of.down_A, of.down_B, of.down_scale))
                owner.each = each
        assigned.changes += news

    def _retire(self, version: Version | None) -> None:
        """Free a version that is no longer the present one, or leave that to its last answer."""
        if version is None:
            return
        if version in self._held:
            self._old.add(version)
        else:
            self._free(version.slot)

    def _free(self, slot: int) -> None:
        for candidate in candidates(self.model):
            each = candidate.owner.each
            for table in () if each is None else each.tables:
                table.take(slot)


def same_base(one: str, other: str) -> bool:
    """True if two names of a base mean the same model: the same folder, or the same last part."""
    folders = Path(one).expanduser(), Path(other).expanduser()
    if all(folder.is_dir() for folder in folders) and folders[0].resolve() == folders[1].resolve():
        return True
    return folders[0].name.lower() == folders[1].name.lower()


def _factors(A: Tensor, B: Tensor, scale: float) -> Factors:
    return Factors(A.detach(), B.detach(), scale)


def _misfit(owner: nn.Module, adapter: LowRank | ExpertLowRank) -> str:
    """ "has A (4, 32) and B (48, 4), but the layer maps 48 -> 48"; empty if the adapter fits."""
    if isinstance(owner, Linear) and isinstance(adapter, LowRank):
        sizes = [(adapter.A, adapter.B, owner.in_features, owner.out_features)]
    elif isinstance(owner, Experts) and isinstance(adapter, ExpertLowRank):
        D, I = owner.hidden_size, owner.before * owner.intermediate_size
        sizes = [
            (adapter.gate_up_A, adapter.gate_up_B, D, I),
            (adapter.down_A, adapter.down_B, owner.intermediate_size, D),
        ]
    else:
        return "is another kind of layer"
    for A, B, width, height in sizes:
        if A is not None and B is not None and (A.shape[-1], B.shape[-2]) != (width, height):
            return f"has A {tuple(A.shape)} and B {tuple(B.shape)}, but the layer maps {width} -> {height}"
    return ""
