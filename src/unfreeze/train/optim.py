"""AdamW for all trainable parameters: adapters (fp32 beside a bf16 base) or all weights.

Weight decay is decoupled (Loshchilov and Hutter, arXiv:1711.05101).
It applies to matrices, embeddings and stacked experts (dimension 2 or more), never to norms and biases,
nor to a vector whatever its dimensions: Kimi Linear's A_log is [1, 1, H, 1].
LoRA's A and B are decayed too, as PEFT with the Hugging Face trainer does; DoRA's m is not (a vector, the
length of a weight's rows), which that trainer decays.
A bf16 weight is updated through an fp32 master copy, because an update below 1/256 of a weight would round
away.
"""

# torch's tolist, vector_norm, backward and hooks are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.rows import here
from unfreeze.kernels import adamw as kernel
from unfreeze.parallel.processes.collectives import ALONE, Group, buckets
from unfreeze.parallel.processes.mesh import HeldPart
from unfreeze.train.host_state import OnDevice, Place
from unfreeze.train.moments import Float32, Int8, Moments, Momentum, Part, state_of


class NonFinite(UserError):
    """A loss or gradient that is NaN or infinite.

    Raised before the update, so the weights are still those of the step before.
    """


@dataclass(frozen=True)
class Update:
    """Facts about one update.

    grad_norm   before clipping
    clip_scale  factor applied to the gradients (1.0: not clipped)
    """

    grad_norm: float
    clip_scale: float


class AdamW:
    """The optimizer of a model's trainable parameters; the arithmetic is in kernels/adamw.

    m = b1 m + (1-b1) g
    v = b2 v + (1-b2) g^2
    w -= lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay w)

        moments  storage of m and v (train/moments.py)
        impl     an implementation of the kernel ("auto": by record)
        held     parameter name -> the part this process holds (processes/mesh.py). None: all of each
        place    storage of the moments between updates (train/host_state.py)

    A class that builds on this one updates the parameters `_elsewhere` itself (train/muon.py).

    State is created here, not at the first step, so that all memory is allocated before the run starts, and a
    save can be checked name by name.
    Raises ConfigError if no parameter trains, or if a parameter has other rows than are held. While FSDP2 has
    a module all-gathered, its parameters are full tensors, not the local shards; an optimizer created then
    would update copies.
    """

    _elsewhere: Collection[str] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: Moments = "float32",
        impl: str = "auto",
        held: Callable[[str], HeldPart] | None = None,
        place: Place | None = None,
    ):
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        if not self.parameters:
            raise ConfigError(
                "no parameter is trainable",
                next="attach an adapter (lora.targets), or pretrain, which trains all weights",
            )
        if held is not None:
            _refuse_gathered(self.parameters, held)
        self.settings = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay} | (
            {} if moments == "float32" else {"moments": moments}
        )
        self._betas, self._eps, self._weight_decay, self._impl = betas, eps, weight_decay, impl
        # name -> the fp32 (or wider) tensor that is updated: the parameter itself, this process's shard of
        # it, or a master copy of a half-precision parameter
        self._half = {n for n, p in self.parameters.items() if p.dtype not in (torch.float32, torch.float64)}
        self._divided = {name for name, p in self.parameters.items() if here(p) is not p}
        self._masters: dict[str, Tensor] = {
            name: p.detach().float() if name in self._half else here(p) for name, p in self.parameters.items()
        }
        self._place: Place = place or OnDevice()
        self._held = held
        # the parameters that AdamW itself updates: all, unless a class that builds on this one has others
        self._state = {
            name: state_of(moments, name, master, self._place.like(master), self._first(name))
            for name, master in self._masters.items()
            if name not in self._elsewhere
        }
        self._place.keep(self._state)
        self._gradients: dict[str, Tensor] = {}  # of half-precision weights
        self._on_cpu = all(master.device.type == "cpu" for master in self._masters.values())
        self._used = 0.0  # learning rate of the last update

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """name -> the tensor that updates change: the parameter, or its fp32 master if in half precision."""
        return self._masters

    @property
    def learning_rate(self) -> float:
        """The learning rate that the last update really used (docs/why/trust.md R4).

        On a CPU, where reading costs nothing, it is measured by a probe of known gradient (_probe).
        Elsewhere it is the value passed to the kernel.
        """
        return self._used

    def zero_grad(self) -> None:
        """Drop the last gradients. Called when a step starts: hooks after a step may still read them."""
        self._gradients.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def collect(self) -> None:
        """Collect the gradients of half-precision weights after each backward.

        The first stays in half precision; from the second on they are summed in fp32. So accumulation doesn't
        round to bf16, and a step of one micro-batch needs no fp32 copy of all gradients.
        """
        for name, parameter in self.parameters.items():
            if name not in self._half or parameter.grad is None:
                continue
            before = self._gradients.get(name)
            self._gradients[name] = (
                parameter.grad
                if before is None
                else before.to(self._masters[name].dtype).add_(parameter.grad)
            )
            parameter.grad = None

    def gradient(self, name: str) -> Tensor | None:
        """Return a parameter's gradient of the last step, before clipping; None if it got none.

        float32, or the dtype of backward.
        """
        gradient = self._gradients.get(name) if name in self._half else self.parameters[name].grad
        return None if gradient is None else here(gradient)

    def _first(self, name: str) -> int:
        """Return the index of the first row of a parameter held here."""
        rows = None if self._held is None else self._held(name).rows
        return 0 if rows is None else rows.first

    def held(self, name: str, group: Group) -> HeldPart:
        """Return what this process holds of a parameter, in a step of `group`'s processes."""
        return HeldPart(None, group, group.size) if self._held is None else self._held(name)

    def sum_gradients(self, group: Group) -> list[bool]:
        """Sum the gradients in fp32 over the processes that hold the same rows, in the parameters' order.

        A parameter that no token of this process reached (an expert) takes part with zeros, so every process
        makes the same calls (docs/why/trust.md M1).
        Return for each parameter True if this process has a gradient; [] for one process. The step sums these
        over the processes with its other numbers, and passes the sums to `keep_reached`.
        """
        if group.size == 1:
            return []
        own = {name: self.gradient(name) for name in self.parameters}
        reached = [gradient is not None for gradient in own.values()]

        # Bucket by bucket: each half-precision gradient is freed for its fp32 sum before the next sum is
        # made. All sums at once would take 6 bytes per weight, not 4.
        for over, names in self._by_group(group):
            names = [name for name in names if name not in self._divided]  # FSDP2 has already summed these
            masters = iter(names)
            for bucket in buckets([self._masters[name] for name in names]):
                part = {name: self._masters[name] for name in islice(masters, len(bucket))}
                sums = {
                    name: torch.zeros_like(m) if (g := own.pop(name)) is None else g.to(m.dtype)
                    for name, m in part.items()
                }
                over.sum_(list(sums.values()))
                for name in part:
                    if name in self._half:
                        self._gradients[name] = sums[name]
                    else:
                        self.parameters[name].grad = sums[name].detach()
        return reached

    def _by_group(self, group: Group) -> list[tuple[Group, list[str]]]:
        """Return the parameter names grouped by the processes over which their gradients are summed."""
        by_group: dict[int, tuple[Group, list[str]]] = {}
        for name in self.parameters:
            over = self.held(name, group).summed
            by_group.setdefault(id(over), (over, []))[1].append(name)
        return list(by_group.values())

    def keep_reached(self, counts: Sequence[float]) -> None:
        """Drop the zero gradients of parameters that no process reached: they get no gradient.

        counts: for each parameter, the number of processes with a gradient; [] for one process.
        Raises UserError if no process reached any.
        """
        if counts and not any(counts):
            raise UserError(f"no gradient reached any of {len(self.parameters)} trainable parameters")
        for name, count in zip(self.parameters, counts, strict=False):
            if not count:
                self.parameters[name].grad = None
                self._gradients.pop(name, None)

    def grad_norm(self) -> Tensor:
        """Return the norm of all gradients held here, on the device: the host does not wait for it.

        Raises UserError if there is no gradient.
        """
        gradients = [g for name in self.parameters if (g := self.gradient(name)) is not None]
        if not gradients:
            raise UserError(f"no gradient reached any of {len(self.parameters)} trainable parameters")
        return _norm_of(gradients)

    def grad_norms(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return (norm of the replicated gradients, this process's share of the sharded ones' square).

        The share is Σ |own part|² / copies in float64; summed over all processes it is the square of the norm
        of the sharded gradients. Both stay on the device.
        """
        own: dict[int, list[Tensor]] = {}
        for name in self.parameters:
            if (gradient := self.gradient(name)) is not None:
                own.setdefault(self.held(name, group).copies, []).append(gradient)
        if not own:
            raise UserError(f"no gradient reached any of {len(self.parameters)} trainable parameters")
        whole = own.pop(group.size, None)
        device = next(iter(self._masters.values())).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        share = sum((_norm_of(part).double().square() / copies for copies, part in own.items()), zero)
        return zero if whole is None else _norm_of(whole), share

    def refuse_non_finite(self, norm: float) -> None:
        """Raise NonFinite, naming the first parameter at fault, if `norm` is not finite.

        norm: the number read from grad_norm().
        """
        if not math.isfinite(norm):
            raise NonFinite(self._describe_non_finite(norm))

    def update(self, learning_rate: float, max_norm: float, norm: float | None = None) -> Update:
        """Clip by the global norm (max_norm 0: don't), then make one AdamW update.

        norm: grad_norm() of these gradients, as a number. None: it is read here, which waits for the GPU.
        The gradients themselves are unchanged: clipping is a factor inside the update.
        Raises NonFinite before anything is changed.
        """
        norm = float(self.grad_norm()) if norm is None else norm
        self.refuse_non_finite(norm)
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        self._used = self._move(learning_rate, scale)
        # kernels write by addresses, which torch does not see: what is kept by version (adapters/dora.py)
        # would be of earlier weights
        torch.autograd.graph.increment_version([p.detach() for p in self.parameters.values()])
        return Update(grad_norm=norm, clip_scale=scale)

    def _move(self, learning_rate: float, scale: float) -> float:
        """Update every parameter that has a gradient, times `scale`; return the rate that was used."""
        rule = kernel.AdamWRule(learning_rate, self._betas, self._eps, scale)
        probe = _probe(rule) if self._on_cpu else None
        due: dict[str, kernel.AdamWUpdate] = {}
        for name, state in self._state.items():
            gradient, parameter, master = self.gradient(name), self.parameters[name], self._masters[name]
            if gradient is None:
                continue
            state.step += 1.0
            if not master.numel():  # with few rows, some processes hold none
                continue
            weight = parameter.detach() if name in self._half else None
            decay = self._weight_decay if _decays(parameter.shape) else 0.0
            due[name] = kernel.AdamWUpdate(
                master.detach(),
                gradient.detach(),
                state.exp_avg,
                state.exp_avg_sq,
                weight,
                decay,
                int(state.step),
            )
        self._apply(due, [] if probe is None else [probe], rule)
        return rule.learning_rate if probe is None else _applied(probe, rule)

    def _apply(
        self, due: Mapping[str, kernel.AdamWUpdate], others: list[kernel.AdamWUpdate], rule: kernel.AdamWRule
    ) -> None:
        """Apply the named updates, and others without a name.

        float32 moments go to the kernel in one call; if they are in host memory, in one call per group. int8
        ones are decoded and updated one by one.
        """
        every = [u for name, u in due.items() if not isinstance(self._state[name], Int8)] + others
        for states in self._place.rounds({name: self._state[name] for name in due}):
            for name, state in states.items():
                update = replace(due[name], exp_avg=state.exp_avg, exp_avg_sq=state.exp_avg_sq)
                if isinstance(state, Int8):
                    state.update(update, rule, self._impl)
                else:
                    others.append(update)
            if others:
                kernel.adamw(others, rule, self._impl, every)
            others = []
        if others:
            kernel.adamw(others, rule, self._impl, every)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live state, to save or to copy into.

        exp_avg, exp_avg_sq and step of each parameter, and its master if it has one.
        """
        self._place.settle()
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            tensors |= {f"{part}.{name}": tensor for part, tensor in self._moments_of(name).tensors().items()}
            if name in self._half or self.held(name, ALONE).half:
                tensors[f"master.{name}"] = master
        return tensors

    def _moments_of(self, name: str) -> Float32 | Int8 | Momentum:
        return self._state[name]

    def weights(self) -> dict[str, Tensor]:
        """Return the live weights by name, as the model computes with them.

        Without those that FSDP2 rounds from a master at each use: the master stands for them.
        """
        whole = {name: p for name, p in self.parameters.items() if not self.held(name, ALONE).half}
        return {name: here(p).detach() for name, p in whole.items()}

    def parts(self) -> dict[str, Part]:
        """Return name (of a parameter or of `tensors`) -> the part held here, if not all of it."""
        parts: dict[str, Part] = {}
        for name in self.parameters:
            if (rows := self.held(name, ALONE).rows) is not None:
                parts |= {name: rows, f"master.{name}": rows}
                parts |= {f"{part}.{name}": of for part, of in self._moments_of(name).parts(rows).items()}
        return parts

    def _describe_non_finite(self, norm: float) -> str:
        bad = [
            name
            for name in self.parameters
            if (g := self.gradient(name)) is not None and not bool(g.isfinite().all())
        ]
        if not bad:
            where = "" if self._held is None else " of this process"
            return (
                f"the gradient norm is {norm} but every gradient{where} is finite: their squares overflow"
                + (", or another process's is not finite" if where else "")
            )
        return (
            f"the gradient norm is {norm}: {len(bad)} of {len(self._masters)} parameters have a non-finite"
            f" gradient; first: {bad[0]}"
        )


def _refuse_gathered(parameters: Mapping[str, nn.Parameter], held: Callable[[str], HeldPart]) -> None:
    """Raise ConfigError if a parameter has other rows than this process holds of it."""
    for name, parameter in parameters.items():
        rows = held(name).rows
        if rows is not None and (count := here(parameter).shape[0]) != len(rows):
            raise ConfigError(
                f"{name} has {count:,} rows and {len(rows):,} of {rows.of:,} are held here: it is gathered"
                " for a forward pass, and an optimizer created now would never update it",
                next="create AdamW before the first forward pass",
            )


def _decays(shape: torch.Size) -> bool:
    """A matrix, of one row too, or several; of more dimensions, at least two sizes above 1."""
    return len(shape) == 2 or sum(size > 1 for size in shape) > 1


def _probe(rule: kernel.AdamWRule) -> kernel.AdamWUpdate:
    """Return a parameter of value 0 and (clipped) gradient 1; its first update is -lr / (1 + eps).

    It goes through the kernel with the others, to measure the learning rate that was used.
    """
    zero, one = (torch.full((1,), value, dtype=torch.float32) for value in (0.0, 1.0))
    return kernel.AdamWUpdate(
        zero, one / rule.gradient_scale, zero.clone(), zero.clone(), None, weight_decay=0.0, step=1
    )


def _applied(probe: kernel.AdamWUpdate, rule: kernel.AdamWRule) -> float:
    """Return the learning rate measured by the probe, or the given one if float32 shows no difference."""
    moved = -float(probe.master) * (1.0 + rule.eps)
    return rule.learning_rate if math.isclose(moved, rule.learning_rate, rel_tol=1e-5) else moved


def _norm_of(gradients: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([_norm(gradient) for gradient in gradients]))


PIECE = 1 << 19  # number of elements whose squares are summed at once


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm of one gradient, in float32.

    On CPU it is computed in pieces: torch's own sum of the squares of 40 million normal numbers is up to 0.3
    % too small, and its norm of a bf16 tensor would be rounded to bf16.
    """
    exact = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.device.type != "cpu" or gradient.numel() <= PIECE:
        return torch.linalg.vector_norm(gradient, dtype=exact)
    pieces = gradient.flatten().split(PIECE)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(piece, dtype=exact) for piece in pieces])
    )
