"""Several optimizer steps on one rollout: its groups dealt to updates, and the updates still to come.

A save may fall between two of them. The policy has then moved away from the one that sampled, so the rest of
the rollout cannot be sampled again: the save keeps its training passes (train/state.py: State.kept).

T tokens of a batch, N of them sampled, S documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from unfreeze.core.batch import Batch
from unfreeze.core.draws import number
from unfreeze.core.torch_types import flags, floats

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.rollout.rollouts import Rolled

Update = list[Batch]
"""The training passes of one optimizer step."""
Measure = Callable[[Batch], "Tensor"]
"""batch on the host -> the trainer's log p of every supervised target, float64 [N], without gradient."""

FIELDS = ("tokens_T", "targets_T", "weights_T", "positions_T", "starts_S")


def dealt(rolled: Rolled, updates: int, seed: int) -> list[Rolled]:
    """Deal the groups of a rollout to its updates, in an order drawn from (seed, the rollout's first step).

    Groups with a signal come first in it, so that each update gets as many as the others, or one less. One
    update has all groups in their own order. Advantages stay those of the whole rollout.
    """
    if updates == 1:
        return [rolled]
    signal = flags(rolled.groups.signal_P)
    places = range(len(rolled.answers))
    order = sorted(places, key=lambda place: (not signal[place], number(seed, rolled.step, place)))
    return [_of(rolled, order[update::updates]) for update in range(updates)]


def _of(rolled: Rolled, places: list[int]) -> Rolled:
    """Return these groups alone."""
    groups = type(rolled.groups)(*(values[places] for values in rolled.groups))
    return replace(rolled, answers=[rolled.answers[place] for place in places], groups=groups)


def numbered(updates: Sequence[Update]) -> list[Update]:
    """Return the passes of all but the first update with documents["update"], int64 [S]: its number from 0.

    In those, trainer and sampler differ because the policy has moved, which is no fault.
    """

    def marked(batch: Batch, update: int) -> Batch:
        number_S = torch.full_like(batch.starts_S, update)
        return replace(batch, documents={**batch.documents, "update": number_S})

    return [
        [marked(batch, index) for batch in update] if index else update
        for index, update in enumerate(updates)
    ]


def with_trainer(updates: Sequence[Update], measure: Measure, group: Group) -> list[Update]:
    """Return the passes with extras["trainer_log_p"], float32 [T]: log p before the first update.

    Every process measures its share of the passes, and all get all.
    """
    every = [batch for update in updates for batch in update]
    own = group.share(list(range(len(every))))
    texts = group.texts(json.dumps([[place, floats(measure(every[place]))] for place in own]))
    by_place = {place: values for text in texts for place, values in json.loads(text)}

    def measured(batch: Batch, values: Sequence[float]) -> Batch:
        log_p_T = torch.zeros(batch.num_tokens)
        log_p_T[batch.supervised()] = torch.tensor(values, dtype=torch.float32)
        return replace(batch, extras={**batch.extras, "trainer_log_p": log_p_T})

    whole = iter([measured(batch, by_place[place]) for place, batch in enumerate(every)])
    return [[next(whole) for _ in update] for update in updates]


def as_tensors(updates: Sequence[Update]) -> dict[str, Tensor]:
    """Return the passes as named tensors: "0.1.tokens_T" of the second pass of the first update."""
    tensors: dict[str, Tensor] = {}
    for index, update in enumerate(updates):
        for place, batch in enumerate(update):
            of_batch = {name: getattr(batch, name) for name in FIELDS}
            of_batch |= {f"extras.{name}": values for name, values in batch.extras.items()}
            of_batch |= {f"documents.{name}": values for name, values in batch.documents.items()}
            if batch.examples is not None:
                of_batch["examples"] = torch.tensor([batch.examples])
            tensors |= {f"{index}.{place}.{name}": tensor for name, tensor in of_batch.items()}
    return tensors


def of_tensors(tensors: Mapping[str, Tensor], passes: int) -> list[Update]:
    """Restore the result of as_tensors.

    passes: processes, perhaps others than saved it. Where they don't divide an update's passes, copies of the
    last one follow, without a supervised token.
    """
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, place, field = name.split(".", 2)
        parts.setdefault((int(index), int(place)), {})[field] = tensor
    updates: list[Update] = []
    for (_, place), fields in sorted(parts.items()):
        if not place:
            updates.append([])
        batch = Batch(
            fields["tokens_T"],
            fields["targets_T"],
            fields["weights_T"],
            fields["positions_T"],
            fields["starts_S"],
            extras=_under("extras.", fields),
            documents=_under("documents.", fields),
            examples=int(fields["examples"]) if "examples" in fields else None,
        )
        updates[-1].append(batch)
    return [_filled_up(update, passes) for update in updates]


def _under(prefix: str, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in fields.items() if name.startswith(prefix)}


def _filled_up(update: Update, passes: int) -> Update:
    last = update[-1]
    silent = replace(last, weights_T=torch.zeros_like(last.weights_T), examples=0)
    return [*update, *[silent] * (-len(update) % passes)]
