"""What place.* of a run means for a plan, whose machine need not be here."""

from __future__ import annotations

from typing import Any

from unfreeze.config.tables import Place
from unfreeze.core.errors import ConfigError
from unfreeze.parallel.fleet import Fleet
from unfreeze.parallel.mesh import check_split


def given_places(place: Place, train: str, machine: Fleet, num_experts: int) -> dict[str, Any]:
    """Field of a Layout -> what place.* says of it; nothing for "auto".

    Raises ConfigError for what a run would refuse, and for what only a run's own plan counts.
    """
    off = {
        "experts": ("host", "disk"),
        "rest": ("peers",),
        "boundary": ("host",),
        "weights": ("sharded",),
        "optimizer": ("host",),
    }
    asked = place.model_dump()
    moved = [name for name, places in off.items() if asked[name] in places]
    moved += ["split"] if asked["split"] not in ("auto", 1) else []
    moved += ["buffer"] if asked["buffer"] != "auto" else []
    for name in moved:
        why, next = "", f"--place.{name} auto"
        if name in ("weights", "buffer"):
            why = "only the plan of a run counts it: unfreeze sft … --plan"
        elif train == "all":
            why = "every weight trains, and what trains lies on the devices"
        elif name == "experts" and not num_experts:
            why = "this model has no routed experts"
        elif machine.kind == "cpu" and asked[name] == "host":
            why = "the memory of a machine without a GPU is the host's"
        elif name == "rest" and machine.count == 1:
            why, next = "one device has no peers", f"--hardware with several devices, or {next}"
        if why:
            raise ConfigError(f"place.{name} is {asked[name]}, but {why}", next=next)
    if place.split != "auto":
        check_split(place.split, machine.count, num_experts)
    if asked["rest"] == "peers":
        asked["rest"] = "sharded"  # as a Layout has it
    asked["state"] = "moments" if asked["optimizer"] == "host" else asked["optimizer"]  # likewise
    return {
        name: asked[name]
        for name in ("state", "experts", "rest", "boundary", "split")
        if asked[name] != "auto"
    }
