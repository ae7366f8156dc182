"""Type of a config field that names a device."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from unfreeze.core.devices import not_built


def _built(name: str) -> str:
    if why := not_built(name):
        raise ValueError(why)
    return name


Device = Annotated[str, AfterValidator(_built)]
"""auto, cpu, cuda or cuda:N. torch's other devices are refused before anything is opened."""
