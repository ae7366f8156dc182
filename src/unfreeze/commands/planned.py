"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unfreeze.config.tables import Training
from unfreeze.core.errors import printable
from unfreeze.core.torchrun import nearest_multiples
from unfreeze.core.units import format_bytes, format_count, format_of, format_step
from unfreeze.kernels.precision import Precision
from unfreeze.models.from_shape import Parameters
from unfreeze.parallel.answers import Answers
from unfreeze.parallel.plan.choose import PlanChoice
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.fleet import Fleet
from unfreeze.parallel.plan.words import KERNELS
from unfreeze.report.tables import align


@dataclass(frozen=True)
class Planned:
    """The plan for one machine, as text and as JSON.

    tokens_chosen: True if the plan chose the tokens per step; a run never does.
    micro_batches: as configured; a run refuses a number that is no multiple of the devices.
    answers: those that the model samples before it trains on them, if any.
    parameters: of a new model, all of whose weights train.
    """

    model: str
    fleet: Fleet
    counts: Counts
    choice: PlanChoice
    fits: bool
    adapter_parameters: int
    rank: int
    length: int
    tokens_chosen: bool = False
    micro_batches: int = 1
    proposals: Sequence[str] = ()
    reason: str = ""
    notes: Sequence[str] = ()
    usd_per_hour: float | None = None
    rates: str = ""
    dtype: Precision | None = None
    answers: Answers | None = None
    parameters: Parameters | None = None

    @property
    def runs(self) -> bool:
        """True if a run could start: it fits, and everything that its layout needs is built."""
        return self.fits and not self.choice.not_built

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Price per hour / (3,600 · tokens per second) · 1e6."""
        rate, price = self.choice.tokens_per_second, self.usd_per_hour
        return None if rate is None or price is None else price * 1e6 / (3600 * rate)

    @property
    def experts_per_device(self) -> int:
        """Bytes of the experts that a device owns, wherever they are held."""
        experts = max(1, self.counts.num_experts)
        return self.counts.experts_bytes * -(-experts // self.choice.layout.sharing) // experts

    def fields(self) -> dict[str, Any]:
        """Plain JSON values."""
        choice, time = self.choice, self.choice.time
        return {
            "model": self.model,
            "hardware": self.fleet.name,
            "rank": self.rank or None,
            "sequence_length": self.length,
            "fits": self.fits,
            "bytes": {
                "total": self.counts.experts_bytes + self.counts.rest_bytes,
                "experts": self.counts.experts_bytes,
                "experts_per_device": self.experts_per_device,
                "device": sum(choice.places.device.values()),
                "device_terms": choice.places.device,
                "device_usable": choice.places.device_usable,
                "host": sum(choice.places.host.values()),
                "host_terms": choice.places.host,
                "host_usable": choice.places.host_usable,
                "disk": choice.places.disk,
            },
            "adapter_parameters": self.adapter_parameters,
            **({"parameters": self.parameters.fields()} if self.parameters else {}),
            "tokens_per_step": choice.tokens,
            "layout": choice.layout.words(self.counts.num_experts),
            "place": choice.layout.model_dump(),
            "seconds": None if time is None else {"step": time.step, "shown": time.shown, **time.terms},
            "rollout": time.rollout.fields() if time and time.rollout else None,
            "tokens_per_second": choice.tokens_per_second,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "dominating": time.dominating if time else None,
            "not_built": list(choice.not_built),
            "proposals": list(self.proposals),
            "reason": self.reason or None,
            "notes": list(self.notes),
            "source": self.rates or None,
        }

    def lines(self) -> list[str]:
        """Lines for the terminal."""
        choice, places, time = self.choice, self.choice.places, self.choice.time
        weights = self.counts.experts_bytes + self.counts.rest_bytes
        adapters = (
            f", {format_count(self.adapter_parameters)} adapter parameters" if self.adapter_parameters else ""
        )
        fits = "fits" if self.fits else "does not fit"
        if choice.not_built:
            would = "it would fit" if self.fits else "it would not fit either"
            fits = f"not built yet: {', '.join(choice.not_built)}; {would}"
        experts = f" in all, experts {format_bytes(self.experts_per_device)} per device"
        lines = [
            f"{printable(self.model)} on {self.fleet.name}: {fits}",
            *([f"  {self.parameters.words()}"] if self.parameters else []),
            f"  weights {format_bytes(weights)}{experts * (self.counts.num_experts > 0)}",
            f"  {choice.layout.words(self.counts.num_experts)}",
            f"  {choice.tokens:,} tokens {self._each()}{self._chosen()}{adapters}",
        ]
        lines += [f"  computed in {self.dtype.name} ({self.dtype.why})"] if self.dtype else []

        if self.micro_batches % self.fleet.count:
            near = " or ".join(map(str, nearest_multiples(self.micro_batches, self.fleet.count)))
            lines.append(
                f"  each device needs the same number of micro-batches: a run takes --micro-batches {near}"
            )

        # bytes per place, then the sum
        for place, terms, usable in (
            ("per device", places.device, places.device_usable),
            ("host memory", places.host, places.host_usable),
        ):
            if terms:
                total = format_of(sum(terms.values()), usable)
                named = ((name, format_bytes(size)) for name, size in terms.items() if size)
                rows = [*named, (place, total)]
                lines += [f"  {line}" for line in align(rows).splitlines()]

        if self.fleet.kind == "cpu":
            own = ", and this process" if self.fleet.here else ""
            lines.append(f"  not counted: {KERNELS}{own}")

        # seconds, longest first
        if time is None:
            lines.append(
                "  time: unknown for this machine; to measure it: unfreeze dev kernels measure --to user"
            )
        else:
            longest = sorted(time.terms.items(), key=lambda term: -term[1])[:5]
            words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
            lines.append(
                f"  {format_step(time.step)} {self._each('a training pass')}, {time.shown:.2f} s of it"
                f" waiting for transfers; longest terms: {words}"
            )
            lines.append(f"  {choice.tokens_per_second:,.0f} tokens/s, predicted{self._price()}")
            if time.rollout:
                lines.append(f"  {time.rollout.line()}")
            lines.append(f"  rates: {self.rates}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  nothing found that fits: {self.reason}"] * bool(self.reason)
        return lines + [f"  fits with {line}" for line in self.proposals]

    def _each(self, of_rewards: str = "at most in a training pass") -> str:
        """'a step', or what a pass is of a run with rewards, whose step has several."""
        return of_rewards if self.answers and self.answers.step else "a step"

    def _chosen(self) -> str:
        usual = Training().tokens_per_step * self.fleet.count
        return f" (chosen; a run takes {usual:,} unless you give --tokens-per-step)" * self.tokens_chosen

    def _price(self) -> str:
        usd = self.usd_per_million_tokens
        return "" if usd is None else f"; {usd:.2f} USD per million tokens"
