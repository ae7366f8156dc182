"""Preference losses over pairs of answers to one prompt, or over labelled answers.

l(y) = sum_t log p(y_t | x, y_<t) is the log-probability of an answer over its supervised tokens, n(y) their
number, r(y) = beta · (l(y) - l_ref(y)) its reward. w is the chosen answer, v the rejected one.

dpo     -(1 - s) log sigma(r_w - r_v) - s log sigma(r_v - r_w)            s: label smoothing
        Rafailov et al. 2023 (2305.18290, eq. 7). Assumes Bradley-Terry: the chance of being preferred is the
        sigmoid of a difference of rewards. s > 0 assumes that a share s of the pairs is swapped
ipo     ((l_w - l_ref,w) / n_w - (l_v - l_ref,v) / n_v - 1 / (2 beta))^2
        Azar et al. 2023 (2310.12036, eq. 17). Assumes no rewards: the margin is regressed to 1 / (2 beta), so
        pairs without disagreement do not push it to infinity. Per token, as TRL has it after asking the
        authors
kto     u_w (1 - sigma(r_w - beta z)),  u_v (1 - sigma(beta z - r_v)),  z = max(0, mean l(y') - l_ref(y'))
        Ethayarajh et al. 2024 (2402.01306, eq. 8). Labelled answers, no pairs; y' are answers to other
        prompts of the micro-batch. Assumes prospect theory: gains and losses are perceived relative to z
simpo   -log sigma(beta · (l_w / n_w - l_v / n_v) - gamma)
        Meng et al. 2024 (2405.14734, eq. 6). No reference. Assumes that the mean log-probability per token,
        by which a model chooses its answer, is the reward
orpo    -l_w / n_w - beta log sigma(o_w - o_v),  o = l / n - log(1 - exp(l / n))
        Hong et al. 2024 (2403.07691, eq. 6, 7). No reference: fine-tuning on the chosen answer, and a penalty
        on the odds of the rejected one. Assumes a base that does not answer well yet. TRL's first term also
        counts the prompt's tokens, and is a mean over the tokens of a batch
nll     + nll · (-l_w / n_w), added to dpo, ipo and simpo. These only compare: l_w may fall as long as l_v
        falls faster. Pang et al. 2024 (2404.19733, eq. 1) add the term with weight 1, Llama 3 (2407.21783,
        4.1.4) with 0.2. Per pair, as in the paper; TRL's loss type `sft` is a mean over the chosen tokens of
        a batch

Each is a function of S numbers, so the head runs twice by blocks of rows: without gradients for log p, then
with d loss / d log p as the weight of each token. [T, V] is never in memory.

T tokens, S documents, E examples (pairs, or labelled answers), N supervised tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss

Kind = Literal["dpo", "ipo", "kto", "simpo", "orpo"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WITHOUT_REFERENCE: tuple[Kind, ...] = ("simpo", "orpo")
CHOSEN, REJECTED, MISMATCHED = 1, -1, 0
"""Batch.documents["side"]: the role in a pair, or the label; MISMATCHED: another prompt's answer (KTO's y').
"""

Objective = Callable[["Tensor", "nn.Module", "Batch"], "Loss"]

Reference = Callable[["Batch"], "Tensor"]
"""batch -> l_ref of its documents, float64 [S] on the batch's device."""


class Answers(NamedTuple):
    """Documents of one side: log-probabilities, the reference's (0 without one), supervised tokens."""

    logp_E: Tensor
    ref_E: Tensor
    length_E: Tensor

    @property
    def ratio_E(self) -> Tensor:
        return self.logp_E - self.ref_E

    @property
    def mean_E(self) -> Tensor:
        """Mean log p per token of the answer, clipped below 0 so that the odds are finite."""
        return (self.logp_E / self.length_E).clamp(max=-1e-9)


def preference(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    *,
    kind: Kind = "dpo",
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference: Reference | None = None,
    block_rows: int | None = None,
    impl: str = "auto",
) -> Loss:
    """Return sum_e of the loss `kind` over the batch's examples; its count is their number.

    hidden_TD as in cross_entropy, whose docstring says what the gradients reach. batch.documents has "side"
    [S]:
    CHOSEN and REJECTED in turn for pairs; for labelled answers the CHOSEN, the REJECTED, then the MISMATCHED
    ones.
    metrics, sums over examples: `accuracy` (share of pairs whose chosen answer has the higher reward; for
    labelled answers, share on its side of z; a tie is half, where TRL counts it as wrong: a model that is its
    own reference has not chosen), `margin` (r_w - r_v), `reward_*`, `logp_*` and `length_*` (supervised
    tokens) of chosen and rejected answers; `longer` (share of pairs whose chosen answer is the longer one)
    and `by_length` (share whose longer answer has the higher reward), ties half; for kto, over all pairs of a
    chosen and a rejected answer of the micro-batch, and `kl` (z). The reward of simpo and orpo is beta · l /
    n. kto's means per side are those of the
    micro-batch.
    scores, of each example: `accuracy`, and `logp_likelier`, l of the likelier answer of a pair, or l of a
    labelled
    answer: if a row's value falls, the model becomes less likely to give either of its answers.
    Raises ValueError if `reference` is absent and `kind` needs one.
    """
    import torch

    from unfreeze.core.batch import Loss, send
    from unfreeze.kernels.linear_cross_entropy import head_cross_entropy
    from unfreeze.objectives.log_p import token_log_p

    if reference is None and kind not in WITHOUT_REFERENCE:
        raise ValueError(f"{kind} compares with a reference, but none is given")
    # log p of each document, without gradients
    rows_N = batch.supervised()
    document_N = torch.searchsorted(send(batch.starts_S, rows_N.device), rows_N, right=True) - 1
    per_row_N = token_log_p(hidden_TD, lm_head, batch, block_rows, impl)
    weights_N = batch.weights_T.index_select(0, rows_N)
    logp_S = batch.per_document(per_row_N * weights_N)
    length_S = batch.per_document(weights_N.double()).clamp(min=1)
    if reference is None:
        ref_S = torch.zeros_like(logp_S)
    else:
        with torch.no_grad():
            ref_S = reference(batch).to(logp_S)
    # the loss of each example, and d loss / d log p of each document
    side_S = batch.documents["side"]
    with torch.enable_grad():
        leaf_S = logp_S.detach().requires_grad_()

        def of(side: int) -> Answers:
            places = send((side_S == side).nonzero().squeeze(1), leaf_S.device)
            return Answers(*(x.index_select(0, places) for x in (leaf_S, ref_S, length_S)))

        chosen, rejected = of(CHOSEN), of(REJECTED)
        if kind == "kto":
            each_E, metrics, scores = _kto(
                chosen, rejected, of(MISMATCHED), beta, desirable_weight, undesirable_weight
            )
        else:
            each_E, rewards = _PAIRS[kind](chosen, rejected, beta, gamma, label_smoothing)
            if nll:
                each_E = each_E - nll * chosen.logp_E / chosen.length_E
            metrics, scores = _metrics(chosen, rejected, *rewards), _scores(chosen, rejected, *rewards)
        total = each_E.sum()
        (slope_S,) = torch.autograd.grad(total, leaf_S)
    value = total.detach().float()
    count = 0.0 if batch.examples is None else float(batch.examples)
    loss = Loss(sum=value, count=count, metrics=metrics, each=each_E.detach(), scores=scores)
    if not torch.is_grad_enabled():
        return loss
    # the same gradient through the head: sum_n w_n · -log p_n with w_n = -d loss / d log p_n
    slope_N = -(slope_S.index_select(0, document_N) * weights_N).float()
    passed, _, _ = head_cross_entropy(
        hidden_TD.index_select(0, rows_N),
        lm_head,
        batch.targets_T.index_select(0, rows_N),
        slope_N,
        block_rows,
        impl,
    )
    loss.sum = value + (passed - passed.detach())
    return loss


Each = tuple["Tensor", tuple["Tensor", "Tensor"]]
"""(loss of each pair, (rewards of the chosen answers, rewards of the rejected ones))"""


def _dpo(w: Answers, v: Answers, beta: float, gamma: float, smoothing: float) -> Each:
    from torch.nn.functional import logsigmoid

    margin_E = beta * (w.ratio_E - v.ratio_E)
    each_E = -(1 - smoothing) * logsigmoid(margin_E) - smoothing * logsigmoid(-margin_E)
    return each_E, (beta * w.ratio_E, beta * v.ratio_E)


def _ipo(w: Answers, v: Answers, beta: float, gamma: float, smoothing: float) -> Each:
    margin_E = w.ratio_E / w.length_E - v.ratio_E / v.length_E
    return (margin_E - 1 / (2 * beta)) ** 2, (beta * w.ratio_E, beta * v.ratio_E)


def _simpo(w: Answers, v: Answers, beta: float, gamma: float, smoothing: float) -> Each:
    from torch.nn.functional import logsigmoid

    reward_w, reward_v = beta * w.mean_E, beta * v.mean_E
    return -logsigmoid(reward_w - reward_v - gamma), (reward_w, reward_v)


def _orpo(w: Answers, v: Answers, beta: float, gamma: float, smoothing: float) -> Each:
    import torch
    from torch.nn.functional import logsigmoid

    def odds(mean_E: Tensor) -> Tensor:  # log(1 - e^x) = log(-expm1(x)), exact where e^x is near 1
        return mean_E - torch.log(-torch.expm1(mean_E))

    each_E = -w.mean_E - beta * logsigmoid(odds(w.mean_E) - odds(v.mean_E))
    return each_E, (beta * w.mean_E, beta * v.mean_E)


_PAIRS: dict[str, Callable[[Answers, Answers, float, float, float], Each]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}


def _metrics(w: Answers, v: Answers, reward_w: Tensor, reward_v: Tensor) -> dict[str, float | Tensor]:
    longer_E = (w.length_E - v.length_E).sign()
    values = {
        "accuracy": ((reward_w - reward_v).sign() + 1) / 2,
        "margin": reward_w - reward_v,
        "reward_chosen": reward_w,
        "reward_rejected": reward_v,
        "logp_chosen": w.logp_E,
        "logp_rejected": v.logp_E,
        "length_chosen": w.length_E,
        "length_rejected": v.length_E,
        "longer": (longer_E + 1) / 2,
        "by_length": (longer_E * (reward_w - reward_v).sign() + 1) / 2,
    }
    return {name: value.detach().sum() for name, value in values.items()}


def _scores(w: Answers, v: Answers, reward_w: Tensor, reward_v: Tensor) -> dict[str, Tensor]:
    accuracy_E = ((reward_w - reward_v).detach().sign() + 1) / 2
    return {"accuracy": accuracy_E, "logp_likelier": w.logp_E.detach().maximum(v.logp_E.detach())}


def _lengths(w: Answers, v: Answers) -> dict[str, Tensor]:
    """Return `longer` and `by_length` over all (chosen, rejected) combinations; 1/2 if a side is missing."""
    longer_WV = (w.length_E.unsqueeze(1) - v.length_E).sign()
    higher_WV = (w.ratio_E.unsqueeze(1) - v.ratio_E).detach().sign()
    pairs = max(1, longer_WV.numel())
    return {
        "longer": longer_WV.sum() / pairs / 2 + 0.5,
        "by_length": (longer_WV * higher_WV).sum() / pairs / 2 + 0.5,
    }


def _kto(
    w: Answers, v: Answers, other: Answers, beta: float, gain: float, loss: float
) -> tuple[Tensor, dict[str, float | Tensor], dict[str, Tensor]]:
    """Return losses of (desirable, undesirable) answers in that order, the metrics, and each one's scores."""
    import torch

    # a single answer has no other prompt: z is then 0, as for a negative estimate
    z = other.ratio_E.detach().mean().clamp(min=0) if len(other.logp_E) else w.logp_E.new_zeros(())
    above_E, below_E = beta * (w.ratio_E - z), beta * (z - v.ratio_E)
    each_E = torch.cat([gain * (1 - above_E.sigmoid()), loss * (1 - below_E.sigmoid())])
    count = len(each_E)
    accuracy_E = (torch.cat([above_E, below_E]).detach().sign() + 1) / 2

    def mean(values_E: Tensor) -> Tensor:  # of the micro-batch, as a sum over its examples
        return values_E.detach().sum() * (count / max(1, len(values_E)))

    metrics: dict[str, float | Tensor] = {
        "accuracy": accuracy_E.sum(),
        "margin": mean(beta * w.ratio_E) - mean(beta * v.ratio_E),
        "kl": z * count,
        **{name: value * count for name, value in _lengths(w, v).items()},
    }
    for name, side in (("chosen", w), ("rejected", v)):
        metrics |= {
            f"reward_{name}": mean(beta * side.ratio_E),
            f"logp_{name}": mean(side.logp_E),
            f"length_{name}": mean(side.length_E),
        }
    likelier_E = torch.cat([w.logp_E, v.logp_E]).detach()
    return each_E, metrics, {"accuracy": accuracy_E, "logp_likelier": likelier_E}
