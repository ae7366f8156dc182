"""The machines a run is planned for, which need not be here: "8xH200", "1xH200+768GB", "cpu:24GB".

    COUNTxDEVICE[+HOST MEMORY]     devices of one kind in one or several hosts; a device is a table of
                                   machines.toml, which holds facts with source and date
    cpu:MEMORY                     a machine without a GPU

Host and CPU memory use market sizes: 768GB is 768 GiB, 1TB is 1,024.
Spaces and letter case don't matter.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unfreeze.core.errors import ConfigError, nearest, printable

FACTS = Path(__file__).with_name("machines.toml")
WORDS = re.compile(r"(?:(\d+)x)?([A-Za-z]\w*)(?:\+(\d+(?:\.\d+)?)(Gi?B|Ti?B))?$", re.IGNORECASE | re.ASCII)
CPU = re.compile(r"cpu:(\d+(?:\.\d+)?)(Gi?B|Ti?B)$", re.IGNORECASE | re.ASCII)
MOST_DEVICES, LEAST_GIB, MOST_GIB = 65_536, 0.1, 1e6
PER_HOST = 8  # GPUs per host


class DeviceFacts(BaseModel):
    """Facts about one kind of device; machines.toml explains them and their sources."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    memory_gib: float = Field(ge=0.1, le=1e6)
    matrix: float = Field(ge=1e-3, le=1e9)
    vector: float = Field(ge=1e-3, le=1e9)
    memory_gb_s: float = Field(ge=1e-3, le=1e9)
    link_gb_s: float = Field(ge=1e-3, le=1e9)
    host_gb_s: float = Field(ge=1e-3, le=1e9)
    capability: float = Field(default=8.0, ge=0, le=99)
    source: str
    date: str


@dataclass(frozen=True)
class Fleet:
    """`count` devices of one kind.

    memory  bytes of one device; of the machine if there is no GPU
    host    bytes of host memory in total; 0: not given
    device  its facts; None for a machine without a GPU, and for a GPU in no table
    kind    "cpu" or "cuda"
    here    True if it is this machine, whose kernels may have been measured
    """

    name: str
    count: int
    memory: int
    host: int = 0
    device: DeviceFacts | None = None
    kind: Literal["cpu", "cuda"] = "cuda"
    here: bool = False


def fleet(words: str, table: Path | str = "") -> Fleet:
    """Parse `words`. Raises ConfigError that shows the form, or names the nearest device."""
    plain = "".join(words.split()).replace("×", "x")
    if match := CPU.fullmatch(plain):
        return Fleet(words.strip(), 1, _bytes(*match.groups()), kind="cpu")
    match = WORDS.fullmatch(plain)
    if match is None or plain.lower() == "cpu":
        ends = [name for name in devices(table) if plain.isalnum() and name.lower().endswith(plain.lower())]
        near = f"1x{ends[0]}" if plain and ends else ""
        raise ConfigError(
            f"hardware = {printable(words[:60])!r} is not COUNTxDEVICE[+MEMORY] or cpu:MEMORY"
            + (f"; nearest: {near!r}" if near else ""),
            next=f"write {near or '8xH200, 1xH200+768GB'} or cpu:24GB",
        )
    count, name, amount, unit = match.groups()
    known = devices(table)
    names = {key.lower(): key for key in known}
    if name.lower() not in names:
        raise ConfigError(
            f"hardware: no data for a device {name[:60]!r}{nearest(name, known)}; known: {', '.join(known)}",
            next="a computer without a GPU is cpu:24GB; for another GPU write"
            f" [{name[:20]}] with {', '.join(DeviceFacts.model_fields)} into a file: --machines FILE",
        )
    if count is not None and (len(count) > 9 or not 1 <= int(count) <= MOST_DEVICES):
        raise ConfigError(
            f"hardware = {printable(words[:60])!r}: the number of devices must be 1 to {MOST_DEVICES:,}",
            next="write 8xH200",
        )
    device = known[names[name.lower()]]
    host = _bytes(amount, unit) if amount else 0
    return Fleet(words.strip(), int(count or 1), int(device.memory_gib * 2**30), host, device)


def devices(table: Path | str = "") -> dict[str, DeviceFacts]:
    """Return name -> facts, from machines.toml and the user's table, which has precedence."""
    by_name: dict[str, DeviceFacts] = {}
    for path in (Path(table) if table else None, FACTS):
        if path is None:
            continue
        if not path.is_file():
            raise ConfigError(f"machines = {str(path)!r} is not a file", next="give a TOML file of devices")
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            where = str(error).splitlines()[0]
            raise ConfigError(f"machines = {str(path)!r}: {where}", next="correct the file") from None
        for name, facts in tables.items():
            try:
                by_name.setdefault(name, DeviceFacts.model_validate(facts))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(map(str, (name, *first["loc"])))
                raise ConfigError(
                    f"machines = {str(path)!r}: {printable(field)}: {first['msg']}",
                    next="correct the file; parallel/plan/machines.toml has one table for each device",
                ) from None
    return by_name


def _bytes(amount: str, unit: str) -> int:
    """Return bytes of memory. Raises ConfigError outside 0.1 to 1,000,000 GB."""
    gib = float(amount) * (1024 if unit.upper().startswith("T") else 1)
    if not LEAST_GIB <= gib <= MOST_GIB:
        raise ConfigError(
            f"hardware: {amount[:20]}{unit} of memory is not within {LEAST_GIB} GB to {MOST_GIB:,.0f} GB",
            next="write 1xH200+768GB or cpu:24GB",
        )
    return int(gib * 2**30)
