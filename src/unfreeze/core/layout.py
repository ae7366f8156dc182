"""Where each kind of bytes of a run lies, and what backward recomputes: one type from the config to the page.

    Layout()               the user's wish: [place] of the TOML. "auto" leaves a field to the plan
    parallel/plan/layouts  the wish -> the candidates, fastest first
    RESIDENT               everything whole on the device; a chosen layout has no "auto"

Plans, start lines, events and docs use these names and values, and so do the flags (--place.experts host).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from unfreeze.core.field import about
from unfreeze.core.units import format_bytes

GIB = 2**30


class Layout(BaseModel):
    """Where the parts of a run lie that need not lie on the device, and what is kept for backward."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:  # pydantic's own, which type checkers do not know
        return hash(tuple(self.__dict__.values()))

    experts: Literal["auto", "device", "host", "disk"] = Field(
        default="auto",
        description=(
            "where frozen routed experts lie. device: all there; host, disk: read layer by layer through two"
            " buffers; auto: the first that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="experts", computes=False),
    )
    buffer: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        default="auto",
        description=(
            "GiB of each of the two buffers for experts on host or disk; larger layers come in groups of"
            " experts. 0: a whole layer; auto: a whole layer, or what fits"
        ),
        json_schema_extra=about("Memory and machine", was="buffer", computes=False),
    )
    split: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description=(
            "processes that share one set of experts (expert parallelism). 1: every process holds all; auto:"
            " 1, or the fewest that fit, within a host"
        ),
        json_schema_extra=about("Memory and machine", was="split", computes=False),
    )
    weights: Literal["auto", "device", "sharded"] = Field(
        default="auto",
        description=(
            "with --train all, in several processes. device: each holds all weights; sharded: each holds a"
            " part (as FSDP and ZeRO-3); auto: device if that fits"
        ),
        json_schema_extra=about("Memory and machine", was="weights", computes=False),
    )
    rest: Literal["auto", "device", "peers", "host"] = Field(
        default="auto",
        description=(
            "with adapters: frozen weights other than experts. device: each process holds all; peers: each"
            " holds a part and layers are gathered; host: not built, for plans only; auto: device if that"
            " fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="rest", computes=False),
    )
    boundary: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA and adapters: layer inputs kept for backward. host: in host memory, two on the device"
            " at once; auto: device if that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="boundary", computes=False),
    )
    optimizer: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA and adapters: AdamW's moments between updates. host: in host memory, copied in parts"
            " for an update; auto: device if that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", computes=False),
    )
    adapters: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA: the adapters and their gradients. host: not built, for plans only; auto: device"
        ),
        json_schema_extra=about("Memory and machine", was="adapters", computes=False),
    )
    recompute: Literal["auto", "layers", "selective", "elementwise", "nothing"] = Field(
        default="auto",
        description=(
            "activations kept for backward. layers: each layer's input only; selective: also attention and"
            " experts; elementwise: also linear layers; nothing: all are kept. auto: the fastest that fits in"
            " memory"
        ),
        json_schema_extra=about("Memory and machine", was="recompute memory.recompute"),
    )
    keep_layers: int | None = Field(
        default=None,
        ge=0,
        description=(
            "with recompute selective or elementwise: keep activations of the last N layers only; unset: of"
            " all"
        ),
        json_schema_extra=about("Memory and machine", was="keep_layers memory.keep_layers"),
    )

    def but(self, **changes: Any) -> Self:
        """The same with other values of some fields; they are not checked."""
        return self.model_copy(update=changes)

    def moved(self) -> dict[str, Any]:
        """The fields of `place` that a user or a plan set: neither "auto" nor on the device, whole."""
        fixed = RESIDENT.model_dump(exclude={"recompute", "keep_layers"})
        return {name: value for name in fixed if (value := getattr(self, name)) not in ("auto", fixed[name])}

    @property
    def sharing(self) -> int:
        """Processes that share one set of experts, of a layout that is chosen."""
        return 1 if self.split == "auto" else self.split

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes of one buffer for experts; None: as many as a whole layer's."""
        return None if self.buffer == "auto" or self.buffer == 0 else int(self.buffer * GIB)

    @property
    def boundary_leaves(self) -> bool:
        """Whether layer inputs go to host memory: where nothing is recomputed, none is kept alone."""
        return self.boundary == "host" and self.recompute != "nothing"

    @property
    def sharded(self) -> bool:
        """Whether every weight trains and is divided among the processes (parallel/placement/fsdp.py)."""
        return self.weights == "sharded"

    def not_built(self) -> list[str]:
        """What this layout needs and the code does not do yet, in words."""
        needs = {
            "experts of a layer that are split and come in groups": self.sharing > 1 and self.buffer != 0,
            "the frozen rest streamed from host memory": self.rest == "host",
            "adapters and their optimizer in host memory": self.adapters == "host",
        }
        return [words for words, needed in needs.items() if needed]

    def words(self, num_experts: int = 1) -> str:
        """'experts on host, split over 8; rest on peers; recompute layers': what is not whole on the device.

        num_experts: of experts nothing is said where the model has none.
        """
        place = {name: getattr(self, name) for name in ("rest", "boundary", "optimizer", "adapters")}
        experts = f"experts on {self.experts}"
        if self.buffer_bytes:
            experts += f" in groups of {format_bytes(self.buffer_bytes)}"
        if self.sharing > 1:
            experts += f", split over {self.sharing}"
        parts = [experts] if num_experts and experts != "experts on device" else []
        parts += ["weights sharded"] * self.sharded
        parts += [f"{name} on {where}" for name, where in place.items() if where != "device"]
        kept = "" if self.keep_layers is None else f" but for the last {self.keep_layers} layers"
        return "; ".join([*(parts or ["everything on the device"]), f"recompute {self.recompute}{kept}"])


RESIDENT = Layout(
    experts="device",
    buffer=0.0,
    split=1,
    weights="device",
    rest="device",
    boundary="device",
    optimizer="device",
    adapters="device",
    recompute="layers",
)
"""Everything whole on the device; each layer keeps its input alone."""
