"""A finished run as tests look at it, and a run that stops between two steps."""

import torch
from safetensors.torch import load_file


def adapter(run) -> dict[str, torch.Tensor]:
    return load_file(run.path / "adapter" / "adapter_model.safetensors")


def of_kind(run, kind: str) -> list[dict]:
    return [event for event in run.events if event["kind"] == kind]


class Stopped(Exception):
    pass


def stopping_at(step: int):
    """A hook that raises after that step, before its save."""

    def stop(state, result):
        if state.step == step:
            raise Stopped

    return stop
