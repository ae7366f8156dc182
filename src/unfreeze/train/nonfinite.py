"""Locate the first NaN or infinity of a step: run the step again with every module watched.

NaN first at model.layers.0.input_layernorm, 2 of 6 positions, none supervised; zero rows + eps 1e-08, …

Nothing is watched during training, so a finite step costs nothing. T tokens of a micro-batch.
"""

# torch's tolist, vector_norm, backward and hooks are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unfreeze.core.batch import Batch
from unfreeze.core.rows import here
from unfreeze.models import Decoder
from unfreeze.models.finite import bad_weight, is_bad
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.step import Objective, loss_of
from unfreeze.train.suspects import Describe, entries, write_suspects

PHASES = ("forward", "backward", "gradients")
"""Phases in which a non-finite value can be found, in the order of a step."""


@dataclass(frozen=True)
class Culprit:
    """The first place that was not finite.

    line       complete description in words
    documents  which of that micro-batch's packed documents it happened in
    phase      the one of PHASES in which it was found
    weight     a weight of the module that is itself not finite and was never updated: it comes from the
               file
    """

    line: str
    module: str
    dtype: str
    micro_batch: int
    documents: tuple[int, ...]
    phase: str = "forward"
    weight: str = ""


class Named(NamedTuple):
    """A Culprit's line and weight; the line alone if nothing was found."""

    line: str
    weight: str = ""


def investigate(
    model: Decoder,
    micro_batches: Sequence[Batch],
    objective: Objective,
    *,
    recompute: RecomputePolicy,
    group: Group = ALONE,
    folder: Path,
    step: int,
    describe: Describe | None = None,
) -> Named:
    """Name the first non-finite value of a step, identically on every process.

    Its documents are written to <folder>/suspects.jsonl.
    """
    mine = group.share(list(enumerate(micro_batches)))
    own = locate(model, mine, objective, recompute=recompute, anywhere=group.any, updated=step > 1)
    of_all = [json.loads(text) for text in group.texts(json.dumps(asdict(own) if own else None))]
    # experts shared by processes get NaN gradients from another's rows: name the earliest
    culprits = [each for each in of_all if each]
    first = min(culprits, key=lambda each: (PHASES.index(each["phase"]), each["micro_batch"]), default=None)
    if first is None:
        return Named("the replay was finite, so it is not reproducible: suspect the hardware or a race")
    every = entries(micro_batches[first["micro_batch"]], first["micro_batch"])
    chosen = [entry for entry in every if entry["document"] - 1 in first["documents"]] or every
    write_suspects(folder, step, first["line"], chosen, describe)
    return Named(first["line"], first["weight"])


def locate(
    model: Decoder,
    micro_batches: Sequence[tuple[int, Batch]],
    objective: Objective,
    *,
    recompute: RecomputePolicy,
    divisor: float = 1.0,
    anywhere: Callable[[bool], bool] = bool,
    updated: bool = True,
) -> Culprit | None:
    """Replay forward and backward of each (number, batch on the host); None if all is finite this time.

    The place is the module whose input is finite and whose output isn't (in backward: the gradients of its
    output and of its input). Weights, gradients, expert counts and random numbers are restored afterwards.
    Costs about two steps.
    anywhere: returns True if any process found it, when several replay the same number of micro-batches. They
    search together and end together, because a pass may need all of them.
    updated: True if the trained weights are no longer the file's.
    """
    with model.looking(backward=True):
        for number, host_batch in micro_batches:
            batch = host_batch.to(model.device)
            watch = _Watch(number, batch, host_batch, model, updated)
            with watch.forward(model), torch.no_grad():
                loss_of(model, batch, objective, recompute)
            if not anywhere(watch.first is not None):
                with watch.backward(model):
                    loss = loss_of(model, batch, objective, recompute)
                    (loss.sum / divisor).backward()
                watch.look_at_gradients(model)
                if not anywhere(watch.first is not None):
                    continue
            return watch.first
    return None


class _Watch:
    """Hooks over one micro-batch; `first` is set once."""

    def __init__(self, number: int, batch: Batch, host_batch: Batch, model: Decoder, updated: bool):
        self._model, self._updated = model, updated
        self.first: Culprit | None = None
        self._phase = "forward"
        self._number, self._batch, self._host = number, batch, host_batch

    @contextmanager
    def forward(self, model: nn.Module) -> Generator[None]:
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if name:  # the root's forward is never called
                handles.append(module.register_forward_pre_hook(partial(self._entering, name)))
                handles.append(module.register_forward_hook(partial(self._leaving, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def backward(self, model: nn.Module) -> Generator[None]:
        self._phase = "backward"
        handles = [
            module.register_full_backward_hook(partial(self._back, name))
            for name, module in model.named_modules()
            if name
        ]
        try:
            # torch warns that a frozen embedding's input has no gradient, which is expected
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            for handle in handles:
                handle.remove()

    def look_at_gradients(self, model: nn.Module) -> None:
        """Check the parameters' gradients, if every gradient between modules was finite."""
        self._phase = "gradients"
        for name, parameter in model.named_parameters():
            bad = parameter.grad is not None and is_bad(parameter.grad)
            if bad and self.first is None and parameter.grad is not None:
                count = int((~parameter.grad.isfinite()).sum())
                self._found(
                    name,
                    parameter.grad,
                    None,
                    f"in backward, {count:,} of {parameter.numel():,} values of its gradient",
                )

    def _entering(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for tensor in arguments:
            if self.first is None and is_bad(tensor):
                parent, _, child = name.rpartition(".")
                self._found(parent or name, tensor, tensor, f"between its modules, before {child}")

    def _leaving(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if self.first is None and is_bad(tensor):
                self._found(name, tensor, tensor, "", _cause(module, arguments, tensor))

    def _back(self, name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        for tensor in grad_output:
            if self.first is None and is_bad(tensor):
                self._found(name, tensor, tensor, "in backward, in the gradient that reaches it")
        for tensor in grad_input:
            if self.first is None and is_bad(tensor):
                self._found(name, tensor, tensor, "in backward, in the gradient of its input")

    def _found(self, module: str, tensor: Tensor, rows: Tensor | None, where: str, cause: str = "") -> None:
        what = "NaN" if bool(tensor.isnan().any()) else "infinity"
        dtype = str(tensor.dtype).removeprefix("torch.")
        documents, positions = self._positions(rows) if rows is not None else ((), "")
        in_rows = f"micro-batch {self._number + 1}" + (f", {_documents(documents)}" if documents else "")
        parts = [f"{what} first at {module}", where, positions, f"{dtype}, {in_rows}"]
        line = ", ".join(part for part in parts if part) + (f"; {cause}" if cause else "")
        weight = self._of_the_file(module) if self._phase == "forward" else ""
        self.first = Culprit(line, module, dtype, self._number, documents, self._phase, weight)

    def _of_the_file(self, module: str) -> str:
        """Return the first weight of a module that is not finite in the file; "" if there is none."""
        bad = bad_weight(self._model.get_submodule(module), updated=self._updated)
        return f"{module}.{bad[1]}" if bad else ""

    def _positions(self, tensor: Tensor) -> tuple[tuple[int, ...], str]:
        """Return (documents, "2 of 6 positions, none supervised") of a tensor [T, …].

        For a tensor of other length, such as a block of the loss: the number of rows, and no documents.
        """
        bad_N = (
            (~tensor.detach().isfinite()).flatten(1).any(1).cpu()
            if tensor.dim() > 1
            else ~tensor.detach().isfinite().cpu()
        )
        count, total = int(bad_N.sum()), bad_N.numel()
        if total != self._batch.num_tokens:
            return (), f"{count:,} of {total:,} rows"
        places = bad_N.nonzero().flatten()
        documents = torch.searchsorted(self._host.starts_S, places, right=True).sub(1).unique().tolist()
        supervised = int(self._host.weights_T[places].gt(0).sum())
        who = (
            "none supervised"
            if not supervised
            else "all supervised"
            if supervised == count
            else f"{supervised:,} of them supervised"
        )
        return tuple(documents), f"{count:,} of {total:,} positions, {who}"


def _documents(documents: Sequence[int]) -> str:
    """Format documents: 'document 3', 'documents 1, 2 and 14 more'."""
    shown = ", ".join(str(document + 1) for document in documents[:4])
    more = f" and {len(documents) - 4} more" if len(documents) > 4 else ""
    return f"document{'s' if len(documents) > 1 else ''} {shown}{more}"


def _cause(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> str:
    """Explain why a module's output is not finite although its input is, if the cause is known.

    Its weights, a zero row under a norm, or an overflow.
    """
    for name, whole in [*module.named_parameters(), *module.named_buffers()]:
        tensor = here(whole)  # gathering a sharded weight would need all processes
        if is_bad(tensor):
            return (
                f"{int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values of its {name} are not"
                " finite"
            )
    floats = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    if not floats:
        return ""
    x = floats[0].detach()
    eps = getattr(module, "eps", None)
    bad_N = (~output.isfinite()).flatten(1).any(1)
    if isinstance(eps, float) and x.shape[0] == bad_N.numel() and not bool(x.flatten(1)[bad_N].any()):
        rounded = float(torch.tensor(eps, dtype=x.dtype))
        return f"zero rows + eps {eps:g}" + (
            f", which is 0 in {_name(x.dtype)}" if rounded == 0 else f" in {_name(x.dtype)}"
        )
    largest, limit = float(x.abs().max()), torch.finfo(output.dtype).max
    return f"its input is finite, largest {largest:.3g}; the largest {_name(output.dtype)} is {limit:.3g}" + (
        ", so it overflowed" if bool(output.isinf().any()) or largest**2 > limit else ""
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
