"""Surrogate losses of a policy that has moved away from the one that sampled, per token.

p is the policy, q the one that a ratio is taken against, A the advantage, y an answer of n sampled tokens.

    r = p / q of a token        s = (prod r)^(1/n) of an answer        R = prod r of an answer

At p = q every loss has the gradient -A · d log p, the policy gradient. They differ by the weight that a token
gets once p has moved, and by when it gets none.

Corrections are apart from the losses. Where q is the trainer's own policy before the step, a sampler that
computes otherwise drew from another one; a weight or a mask makes up for it.

N sampled tokens of a micro-batch, S documents (answers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.core.batch import Batch

Kind = Literal["reinforce", "ppo", "cispo", "gspo", "dppo", "sapo", "rloo"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Weigh = Literal["none", "token", "answer"]
Mask = Literal["none", "token", "answer"]
Estimator = Literal["k1", "k2", "k3", "k3+"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
CorrectionName = Literal["none", "tis", "tis-sequence", "icepop", "geometric"]


@dataclass(frozen=True)
class Bounds:
    """Limits of the trust region.

    low, high           a ratio is kept within 1 - low and 1 + high (ppo, gspo, rloo, cispo); a probability
                        may fall by low and rise by high (dppo). low 1 or more: no lower limit
    dual                ppo: largest ratio of a token with A < 0. None: no limit
    rising, falling     sapo: temperature of tokens with A > 0, and of the others
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    rising: float = 1.0
    falling: float = 1.05


class Answers:
    """Sums over the sampled tokens of each answer. A document of the batch is one answer."""

    def __init__(self, batch: Batch):
        import torch

        from unfreeze.core.batch import send

        self.batch, rows_N = batch, batch.supervised()
        self.document_N = torch.searchsorted(send(batch.starts_S, rows_N.device), rows_N, right=True) - 1
        ones_N = torch.ones(len(rows_N), dtype=torch.float64, device=rows_N.device)
        self.tokens_N = self.total(ones_N)

    def total(self, values_N: Tensor) -> Tensor:
        """Return for each token the sum over its answer."""
        return self.batch.per_document(values_N).index_select(0, self.document_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Return for each token the mean over its answer."""
        return self.total(values_N) / self.tokens_N


class Tokens(NamedTuple):
    """Inputs of a loss: log p (a leaf), log q, the advantage, the answers."""

    log_p_N: Tensor
    log_q_N: Tensor
    advantage_N: Tensor
    answers: Answers


Each = tuple["Tensor", "Tensor"]
"""(the loss of each token, True where the trust region has cut it)"""


def reinforce(tokens: Tokens, bounds: Bounds) -> Each:
    """-A log p. Williams 1992, Machine Learning 8, 229. Reads no ratio."""
    loss_N = -tokens.advantage_N * tokens.log_p_N
    return loss_N, loss_N.new_zeros(len(loss_N)).bool()


def ppo(tokens: Tokens, bounds: Bounds) -> Each:
    """-min(r A, clip(r) A); with `dual` c and A < 0 at most -c A.

    Schulman et al. 2017, 1707.06347, eq. 7; GRPO, 2402.03300, eq. 3. dual: Ye et al. 2019, 1912.09729.
    """
    ratio_N = (tokens.log_p_N - tokens.log_q_N).exp()
    return _clipped(ratio_N, tokens.advantage_N, bounds)


def gspo(tokens: Tokens, bounds: Bounds) -> Each:
    """-min(s A, clip(s) A) with s of the whole answer. Zheng et al. 2025, 2507.18071.

    s_t = sg(s) · p / sg(p): its gradient is that of s where an answer has one advantage, and an advantage per
    token may be given. The paper divides by answers.
    """
    mean_N = tokens.answers.mean(tokens.log_p_N.detach() - tokens.log_q_N)
    ratio_N = (mean_N + tokens.log_p_N - tokens.log_p_N.detach()).exp()
    return _clipped(ratio_N, tokens.advantage_N, bounds)


def rloo(tokens: Tokens, bounds: Bounds) -> Each:
    """-min(R A, clip(R) A) / n: the answer is one action. Ahmadian et al. 2024, 2402.14740.

    Its baseline, the mean of the other answers, is the advantage's. TRL has the ratio and divides by answers:
    per constant 1.
    """
    ratio_N = tokens.answers.total(tokens.log_p_N - tokens.log_q_N).exp()
    loss_N, cut_N = _clipped(ratio_N, tokens.answers.mean(tokens.advantage_N), bounds)
    return loss_N / tokens.answers.tokens_N, cut_N


def cispo(tokens: Tokens, bounds: Bounds) -> Each:
    """-sg(clip(r)) A log p: no token loses its gradient. MiniMax-M1, 2506.13585, eq. 4 and 5.

    The paper has no lower limit.
    """
    ratio_N = (tokens.log_p_N.detach() - tokens.log_q_N).exp()
    weight_N = ratio_N.clamp(1 - bounds.low, 1 + bounds.high)
    return -weight_N * tokens.advantage_N * tokens.log_p_N, weight_N.ne(ratio_N)


def dppo(tokens: Tokens, bounds: Bounds) -> Each:
    """-r A, or 0 where A > 0 and p - q > high, or A <= 0 and q - p > low.

    Binary total variation of "Rethinking the trust region", 2602.04879, as prime-rl has it.
    """
    moved_N = tokens.log_p_N.detach().exp() - tokens.log_q_N.exp()
    cut_N = (moved_N > bounds.high).where(tokens.advantage_N > 0, moved_N < -bounds.low)
    loss_N = -tokens.advantage_N * (tokens.log_p_N - tokens.log_q_N).exp()
    return loss_N.masked_fill(cut_N, 0.0), cut_N


def sapo(tokens: Tokens, bounds: Bounds) -> Each:
    """-A · 4 / τ · sigmoid(τ (r - 1)), τ by the sign of A. Gao et al. 2025, 2511.20347.

    Nothing is cut: the weight falls smoothly on both sides of r = 1.
    """
    ratio_N = (tokens.log_p_N - tokens.log_q_N).exp()
    tau_N = ratio_N.detach().new_full((len(ratio_N),), bounds.falling)
    tau_N = tau_N.masked_fill(tokens.advantage_N > 0, bounds.rising)
    loss_N = -tokens.advantage_N * 4 / tau_N * (tau_N * (ratio_N - 1)).sigmoid()
    return loss_N, loss_N.new_zeros(len(loss_N)).bool()


def _clipped(ratio_N: Tensor, advantage_N: Tensor, bounds: Bounds) -> Each:
    """-min(ratio · A, clip(ratio) · A), and at most -dual · A where A < 0."""
    plain_N = ratio_N * advantage_N
    bounded_N = ratio_N.clamp(1 - bounds.low, 1 + bounds.high) * advantage_N
    loss_N, cut_N = -plain_N.minimum(bounded_N), bounded_N < plain_N
    if bounds.dual is None:
        return loss_N, cut_N
    most_N = -bounds.dual * advantage_N
    beyond_N = (advantage_N < 0) & (loss_N > most_N)
    return most_N.where(beyond_N, loss_N), cut_N | beyond_N


LOSSES: Mapping[Kind, Callable[[Tokens, Bounds], Each]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dppo": dppo,
    "sapo": sapo,
    "rloo": rloo,
}


@dataclass(frozen=True)
class Correction:
    """Weight and mask of a token, from d = log p - log s. s sampled it; p is the trainer's before the step.

    Against the sampler there is no such p: d is then that of p as it is now.

    weigh  token: min(e^d, cap). answer: min(e^(sum of d), cap), for all its tokens. Truncated importance
           sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL"
    cap    largest weight
    mask   token: 0 where e^d lies outside `band` (IcePop: Ling team 2025, 2510.18855). answer: 0 for all its
           tokens where e^(mean of d) does (geometric)
    band   smallest and largest ratio that are kept
    """

    weigh: Weigh = "none"
    cap: float = 2.0
    mask: Mask = "none"
    band: tuple[float, float] = (0.5, 2.0)

    def weights(self, drift_N: Tensor, answers: Answers) -> Tensor:
        """Return the factor of each token's loss, without gradient."""
        import torch

        factor_N = torch.ones_like(drift_N)
        if self.weigh != "none":
            summed_N = drift_N if self.weigh == "token" else answers.total(drift_N)
            factor_N = summed_N.exp().clamp(max=self.cap)
        if self.mask != "none":
            ratio_N = (drift_N if self.mask == "token" else answers.mean(drift_N)).exp()
            low, high = self.band
            factor_N = factor_N.masked_fill((ratio_N < low) | (ratio_N > high), 0.0)
        return factor_N


CORRECTIONS: Mapping[CorrectionName, tuple[Weigh, Mask]] = {
    "none": ("none", "none"),
    "tis": ("token", "none"),
    "tis-sequence": ("answer", "none"),
    "icepop": ("token", "token"),
    "geometric": ("none", "answer"),
}
"""Name of --correct -> what it weighs, and what it masks."""


def k1(log_p_N: Tensor, reference_N: Tensor) -> Tensor:
    """Value log p - log ref, gradient of k2: its own gradient has mean 0."""
    return _value_of(log_p_N - reference_N, k2(log_p_N, reference_N))


def k2(log_p_N: Tensor, reference_N: Tensor) -> Tensor:
    """(log p - log ref)² / 2: its gradient has the mean of the gradient of KL(p ‖ ref); its value has not."""
    return (log_p_N - reference_N).square() / 2


def k3(log_p_N: Tensor, reference_N: Tensor) -> Tensor:
    """e^d - 1 - d, d = log ref - log p: mean KL(p ‖ ref), never negative.

    Its gradient is that of KL(ref ‖ p).
    """
    d_N = reference_N - log_p_N
    return d_N.expm1() - d_N


def k3_straight(log_p_N: Tensor, reference_N: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    return _value_of(k3(log_p_N, reference_N), k2(log_p_N, reference_N))


def _value_of(value_N: Tensor, gradient_N: Tensor) -> Tensor:
    return value_N.detach() + gradient_N - gradient_N.detach()


KL: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_straight,
}
"""Estimators of KL(p ‖ ref) from tokens that p sampled. Values: Schulman 2020, "Approximating KL divergence".
Gradients: Tang & Munos 2025, 2506.09477. Each token has the gradient of its own term; the effect on
the terms of later tokens is left out."""
