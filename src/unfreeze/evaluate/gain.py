"""The share of what training gained that a merged model keeps, on held-out rows.

    share = (loss of base − loss of merged) / (loss of base − loss of base with adapter)

1: the merged model is as good as the base with its adapter beside it. 0: as the base, so the rounding took
all of it. Below 0: the merged model is worse than the base.
"""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 0.5  # a smaller share is warned about


@dataclass(frozen=True)
class Gain:
    """Held-out losses in nats per token, all on the same `tokens` of `rows` documents."""

    base: float
    adapter: float
    merged: float
    tokens: int
    rows: int

    @property
    def share(self) -> float | None:
        """None where the adapter is no better than the base: there is no gain to keep."""
        gained = self.base - self.adapter
        return (self.base - self.merged) / gained if gained > 0 else None

    def words(self, file: str = "") -> str:
        """One line. file: where the rows are from, "" for those that the run held out."""
        losses = f"base {self.base:.3f}, with adapter {self.adapter:.3f}, merged {self.merged:.3f}"
        on = f"{f'loss on {file},' if file else 'held-out loss on'} {self.rows:,} rows: {losses}"
        if self.share is None:
            return f"{on}: the adapter is no better than the base on these rows, so there is no gain to keep"
        more = ": more than the adapter gained, rounding happened to help here" if self.share > 1.05 else ""
        return f"{on}: {100 * self.share:.1f} % of the gain kept{more}"
