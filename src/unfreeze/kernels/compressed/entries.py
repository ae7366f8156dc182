"""Entries of compressed attention: one for each window of m tokens of a document, the windows side by side.

    e[c] = Σ_j softmax_j(z[j, c] + b[j, c]) · x[j, c]    j over the m tokens of a window, channel by channel

With overlap an entry covers 2 m tokens: x and z have two series of d channels each. The window before gives
the first series, the window itself the second. A document's first window has none before it.
A window that its document does not fill has no entry.
Source: DeepSeek-V4's report, 2.3.1 and 2.3.2; transformers 5.23, models/deepseek_v4.

T tokens, E entries of all documents, S rows of a cache, C channels, d of an entry; n = m tokens, or 2 m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.kernels.recompute import recomputed


@dataclass(frozen=True)
class Entries:
    """Places of the entries of a packed batch, document by document.

    rate       m
    documents  (tokens, entries) of each document
    first_E    int64, the first token of each entry's window
    begins_E   bool, True for the first entry of a document
    """

    rate: int
    documents: tuple[tuple[slice, slice], ...]
    first_E: Tensor
    begins_E: Tensor

    @staticmethod
    def build(starts: Sequence[int], num_tokens: int, rate: int, device: torch.device | str) -> Entries:
        documents: list[tuple[slice, slice]] = []
        first: list[int] = []
        begins: list[bool] = []
        for start, stop in zip(starts, (*starts[1:], num_tokens), strict=True):
            count = (stop - start) // rate
            documents.append((slice(start, stop), slice(len(first), len(first) + count)))
            first += range(start, start + count * rate, rate)
            begins += [place == 0 for place in range(count)]
        places = send(torch.tensor(first, dtype=torch.int64), device)
        return Entries(rate, tuple(documents), places, send(torch.tensor(begins, dtype=torch.bool), device))


def pool(x_TC: Tensor, z_TC: Tensor, bias_mC: Tensor, entries: Entries, *, overlap: bool) -> Tensor:
    """The entries [E, d] in x's dtype; d is C, or C / 2 with overlap. Means are in float32 or wider."""
    own_Em = entries.first_E[:, None] + torch.arange(entries.rate, device=x_TC.device)
    if not overlap:
        return recomputed(_mean, x_TC[own_Em], z_TC[own_Em], shared=(bias_mC,))
    before_Em = (own_Em - entries.rate).clamp(min=0)
    x_End, z_End = (
        torch.cat((first[before_Em], second[own_Em]), dim=1)
        for first, second in (series.chunk(2, dim=-1) for series in (x_TC, z_TC))
    )
    hidden_En1 = entries.begins_E[:, None, None] & _of_before(entries.rate, x_TC.device)
    return recomputed(_mean, x_End, z_End.masked_fill(hidden_En1, -torch.inf), shared=(_both(bias_mC),))


def pool_step(
    x_SnC: Tensor, z_SnC: Tensor, bias_mC: Tensor, first_S: Tensor, *, rate: int, overlap: bool
) -> Tensor:
    """The entry [S, d] of each row's last n tokens. first_S: True if its window is the row's first.

    It is that of a window only for a row whose last token completes one.
    """
    if not overlap:
        return _mean(x_SnC, z_SnC, bias_mC)
    x_Snd, z_Snd = (
        torch.cat((series[:, :rate].chunk(2, dim=-1)[0], series[:, rate:].chunk(2, dim=-1)[1]), dim=1)
        for series in (x_SnC, z_SnC)
    )
    hidden_Sn1 = first_S[:, None, None] & _of_before(rate, x_SnC.device)
    return _mean(x_Snd, z_Snd.masked_fill(hidden_Sn1, -torch.inf), _both(bias_mC))


def _of_before(rate: int, device: torch.device) -> Tensor:
    """bool [2 m, 1]: True for the tokens of the window before."""
    return (torch.arange(2 * rate, device=device) < rate)[:, None]


def _both(bias_mC: Tensor) -> Tensor:
    """b [2 m, d] of the two series, one behind the other."""
    return torch.cat(bias_mC.chunk(2, dim=-1))


def _mean(x_End: Tensor, z_End: Tensor, bias_nd: Tensor) -> Tensor:
    wide = torch.promote_types(x_End.dtype, torch.float32)
    share_End = (z_End.to(wide) + bias_nd).softmax(dim=1)
    return (x_End.to(wide) * share_End).sum(1).to(x_End.dtype)
