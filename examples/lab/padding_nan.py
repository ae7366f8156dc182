"""A NaN that the loss does not show: zeros at padding, and a norm whose eps is 0 in float16.

    python examples/lab/padding_nan.py --arm both --seed 0 --out runs/nan
    unfreeze lab examples/lab/padding_nan.toml

A token with index 0 pads. padding_idx = 0 makes its embedding exactly zero. x / sqrt(mean(x²) + eps) of a
zero row is 0 · (1 / sqrt(eps)). The smallest number of float16 is 6e-8, so an eps of 1e-8 is 0 there, and
the row is 0 · inf = NaN. ignore_index leaves padding's rows out of the loss, which stays finite. But the
backward of softmax multiplies the row's probabilities, NaN, by 0: NaN reaches the head's output, and from
there every row of its weight's gradient.

    both              all of this
    no_padding_idx    padding has an embedding like any other
    no_norm           no norms
    eps_1e-6          an eps that float16 holds
    bfloat16          which holds 1e-8 (its smallest normal number is 1e-38)
    norm_in_float32   unfreeze's own norm, with eps = 1e-8
    attended          as both, with attention by a padding mask that is added to all scores. In the other
                      arms padding is cut out of attention, as packed kernels do

The value is the share of NaN in the head's gradient; bad_parameters is that of tensors whose gradient is
not finite. With eps_1e-6 the head is cured, but the norm's own backward is not: it has (1 / sqrt(eps))³ =
1e9, and the largest number of float16 is 65,504. An eps of 6.2e-4 or more would be needed there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from studying import arguments, attend_eagerly, packed, write
from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss
from unfreeze.models import plain
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of
from unfreeze.models.init import initialize
from unfreeze.train.nonfinite import locate

ARMS = ("both", "no_padding_idx", "no_norm", "eps_1e-6", "bfloat16", "norm_in_float32", "attended")
PAD, IGNORED = 0, -100
VOCABULARY, LENGTH, REAL = 64, 12, (12, 7, 9, 4)


class HalfNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps), all of it in x's dtype, as a first own norm is written."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x_TD: Tensor) -> Tensor:
        eps = torch.tensor(self.eps, dtype=x_TD.dtype)
        return self.weight * (x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps))


def ignoring(hidden_TD: Tensor, lm_head: nn.Module, batch: Batch) -> Loss:
    """Cross entropy over all rows, with ignore_index for those without weight: the diary's loss."""
    labels_T = batch.targets_T.masked_fill(batch.weights_T == 0, IGNORED)
    total = F.cross_entropy(lm_head(hidden_TD).float(), labels_T, ignore_index=IGNORED, reduction="sum")
    return Loss(sum=total, count=batch.weights_T.sum())


def model_of(arm: str, seed: int) -> Decoder:
    """Two layers of llama in the arm's dtype, with its norms and its padding row."""
    eps = 1e-6 if arm == "eps_1e-6" else 1e-8
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = config_of(
        "llama", sizes, {"rms_norm_eps": eps, "initializer_range": 0.2}, vocabulary=VOCABULARY, positions=64
    )
    model = from_config(config, torch.bfloat16 if arm == "bfloat16" else torch.float16, "cpu")
    initialize(model, seed)
    if arm != "no_padding_idx":
        with torch.no_grad():
            model.model.embed_tokens.weight[PAD] = 0
    if arm != "norm_in_float32":
        replace_norms(model, None if arm == "no_norm" else eps)
    if arm == "attended":
        attend_eagerly(model, len(REAL), torch.stack([torch.arange(LENGTH) >= LENGTH - n for n in REAL]))
    return model


def replace_norms(model: Decoder, eps: float | None) -> None:
    """Put a HalfNorm in place of every norm; None: nothing at all."""
    names = [name for name, module in model.named_modules() if type(module).__name__ == "RMSNorm"]
    for name in names:
        parent, _, child = name.rpartition(".")
        own = model.get_submodule(name)
        new = nn.Identity() if eps is None else HalfNorm(own.weight, eps)
        setattr(model.get_submodule(parent), child, new)


def batch_of(seed: int, *, attended: bool = False) -> Batch:
    """Rows padded on the left. attended: padding belongs to its row; else it is a document of its own."""
    drawn = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    taught: list[Tensor] = []
    for real in REAL:
        pads = torch.full((LENGTH - real,), PAD)
        tokens = torch.randint(1, VOCABULARY, (real,), generator=drawn)
        weights = torch.ones(real)
        if attended:
            parts += [torch.cat((pads, tokens))]
            taught += [torch.cat((torch.zeros(len(pads)), weights))]
        else:
            parts += [pads, tokens] if len(pads) else [tokens]
            taught += [torch.zeros(len(pads)), weights] if len(pads) else [weights]
    return packed(parts, taught)


def study(arm: str, seed: int) -> tuple[float, dict[str, float], str]:
    """(NaN share of the head's gradient, further numbers, the line of unfreeze's own search; "" for none)."""
    model, batch = model_of(arm, seed), batch_of(seed, attended=arm == "attended")
    hidden_TD = model.hidden(batch)
    loss = ignoring(hidden_TD, model.lm_head, batch)
    (loss.sum / loss.count).backward()
    gradient = model.lm_head.weight.grad
    real_T = batch.tokens_T != PAD
    bad_T = ~hidden_TD.detach().isfinite().all(1)
    more = {
        "loss": float(loss.sum.detach() / loss.count),
        "bad_padding": float(bad_T[~real_T].float().mean()),
        "bad_real": float(bad_T[real_T].float().mean()),
    }
    each = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    more["bad_parameters"] = sum(not g.isfinite().all() for g in each) / len(each)
    model.zero_grad()
    culprit = locate(model, [(0, batch)], ignoring, recompute=plain)
    return float(gradient.isnan().float().mean()), more, culprit.line if culprit else ""


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    share, more, line = study(options.arm, options.seed)
    print(line or "all is finite")
    finite = {name: number for name, number in more.items() if number == number}
    write(options.out, share, finite | {"loss_is_finite": float("loss" in finite)})
