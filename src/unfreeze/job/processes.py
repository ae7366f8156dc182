"""What the processes of a run settle before it begins: how they share a step."""

from __future__ import annotations

from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import nearest_multiples, sharers, started


def refuse_uneven(config: TrainingConfig, size: int | None = None) -> None:
    """Refuse micro-batches that `size` processes (default: those torchrun started) cannot share equally.

    Every process makes the same number of passes, so that none waits for one that another does not make.
    It is said before anything is downloaded, encoded or loaded.
    """
    size = started().size if size is None else size
    parts = config.memory.micro_batches
    if (saved := _saved_parts(config)) is not None and saved % size:
        counts = ", ".join(map(str, sharers(saved)))
        raise ConfigError(
            f"{config.run_dir} cuts each step into {saved} micro_batches, no multiple of {size} processes,"
            " and within a run that never changes",
            next=f"go on with as many processes as divide {saved} (torchrun --nproc-per-node): {counts}",
        )
    if parts % size:
        near = nearest_multiples(parts, size)
        raise ConfigError(
            f"{size} processes share {parts} micro_batches of a step, which is no multiple of {size}: some"
            " would make more passes than others",
            next=" or ".join(f"--micro-batches {count}" for count in near),
        )


def _saved_parts(config: TrainingConfig) -> int | None:
    """The micro-batches of the run that goes on in this folder; None where none does."""
    from unfreeze.train.run import latest, read_record

    save = latest(config.run_dir)
    parts = None if save is None else read_record(save)["config"].get("micro_batches")
    return parts if type(parts) is int and parts > 0 else None
