"""The policy gradient of sampled answers.

A step minimises sum_t c_t · (w_t · l_t + beta · kl_t) over all sampled tokens of its answers, divided once by
a number that is the same however the answers are packed or dealt to processes:

    tokens     c_t = 1, divided by the sampled tokens of the step
    answers    c_t = 1 / (tokens of t's answer), divided by the answers of the step (GRPO, 2402.03300)
    constant   c_t = 1 / constant, divided by the answers of the step (Dr. GRPO, 2503.20783)
    sum        c_t = 1, divided by 1

l_t is -A_t log p_t with one update per rollout, since no ratio differs from 1 then; the head runs once. Other
losses (ratios.py) and kl are functions of N numbers: the head runs twice by blocks of rows, without gradients
for log p, then with d loss / d log p as the weight of each token. [T, V] is never in memory.

log p is at the sampler's temperature and over the words it draws from, so that a ratio begins at 1.

Extras of a batch: "advantage", "sampler_log_p" (log p of the target when it was sampled), and, if ratios are
against the trainer's own policy before the step, "trainer_log_p"; float32 [T] each. Of a rollout with several
updates, batch.documents["update"] counts them, from 0; without it, it is the first. An answer that is several
documents (data/tokens/transcript.py) has "answer_tokens", its sampled tokens in all of them; ratios of an
answer (gspo, and corrections by answer) are then those of each document.

T tokens, S documents (answers), N sampled tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from unfreeze.objectives.ratios import KL, LOSSES, Answers, Bounds, Correction, Estimator, Kind, Tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss
    from unfreeze.kernels.linear_cross_entropy import Words

Per = Literal["tokens", "answers", "constant", "sum"]
Against = Literal["sampler", "trainer"]
Reference = Callable[["Batch"], "Tensor"]
"""batch -> the reference's log p of every supervised target, float64 [N], without gradient."""


@dataclass(frozen=True)
class Settings:
    """The terms of a policy's loss.

    loss        l_t (ratios.py)
    bounds      its trust region
    against     the policy that ratios are taken against. sampler: as it sampled (two policies in all).
                trainer: the trainer's before the rollout's first update, batch.extras["trainer_log_p"];
                without that, p itself, so that every ratio is 1
    correction  w_t
    per         c_t, and the divisor
    constant    of `per` "constant": tokens, such as the longest answer allowed
    kl, beta    estimator of KL(p ‖ reference), and its weight. beta 0: no reference is asked
    """

    loss: Kind = "reinforce"
    bounds: Bounds = field(default_factory=Bounds)
    against: Against = "sampler"
    correction: Correction = field(default_factory=Correction)
    per: Per = "tokens"
    constant: float = 1.0
    kl: Estimator = "k3"
    beta: float = 0.0

    @property
    def one_pass(self) -> bool:
        """True if the loss is linear in log p with weights known before: the head runs once."""
        corrects = (self.correction.weigh, self.correction.mask) != ("none", "none")
        return self.loss == "reinforce" and not corrects and not self.beta


def policy(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    settings: Settings | None = None,
    *,
    reference: Reference | None = None,
    words: Words | None = None,
    block_rows: int | None = None,
    impl: str = "auto",
) -> Loss:
    """Return the sum of the loss over the batch's sampled tokens, those of weight above 0.

    hidden_TD as in cross_entropy. words: those that the sampler draws from, and its temperature.
    count      the batch's own: its examples if it has some, else the sum of weights_T. With a `per` other
               than tokens it must have examples (rollout/groups.py: divided).
    metrics    means over sampled tokens, as sums with metric_count: "entropy" -log p, an estimate; with
               ratios or corrections "ratio" p / q, "clip_fraction" (cut by the trust region), "masked" (by
               the correction); with beta "kl"; in the first update, with "sampler_log_p" in the extras,
               "gap" |log p - log p of the sampler|
    largest    "ratio_max", "gap_max"
    The gradient reaches hidden_TD and the trainable parts of lm_head.
    Raises ValueError for beta without a reference, for a `per` other than tokens without examples, and for
    extras that are missing.
    """
    import torch

    from unfreeze.objectives.log_p import token_log_p, weighted_log_p

    settings = settings or Settings()
    if settings.beta and reference is None:
        raise ValueError(f"beta is {settings.beta}, but no reference is given")
    if settings.per != "tokens" and batch.examples is None:
        raise ValueError(f"per {settings.per!r} needs the step's divisor in Batch.examples")
    weights_N = batch.weights_T.index_select(0, batch.supervised()).double()
    advantage_N = _needed(batch, "advantage", "a policy gradient")
    answers = Answers(batch)
    share_N = weights_N * _share(settings, answers, _extra(batch, "answer_tokens"))

    # linear in log p: the head runs once, and its log p is known afterwards
    if settings.one_pass:
        total, log_p_N = weighted_log_p(
            hidden_TD, lm_head, batch, -advantage_N * share_N, block_rows, impl, words=words
        )
        return _loss(batch, total, log_p_N.double(), weights_N, {}, {})

    # log p without gradients, then the loss as a function of these N numbers and its slopes
    log_p_N = token_log_p(hidden_TD, lm_head, batch, block_rows, impl, words=words)
    reference_N = None
    if settings.beta and reference is not None:
        with torch.no_grad():
            reference_N = reference(batch).to(log_p_N)
    with torch.enable_grad():
        leaf_N = log_p_N.detach().requires_grad_()
        each_N, means = _each(leaf_N, reference_N, advantage_N, batch, answers, settings)
        loss = (share_N * each_N).sum()
        (slope_N,) = torch.autograd.grad(loss, leaf_N)
    total = loss.detach().to(torch.promote_types(hidden_TD.dtype, torch.float32))
    if torch.is_grad_enabled():
        passed, _ = weighted_log_p(hidden_TD, lm_head, batch, slope_N, block_rows, impl, words=words)
        total = total + (passed - passed.detach())
    largest = {"ratio_max": means["ratio"]}
    return _loss(batch, total, log_p_N, weights_N, means, largest)


def _share(settings: Settings, answers: Answers, whole_N: Tensor | None) -> Tensor | float:
    """c_t of each sampled token. whole_N: tokens of its answer; None: a document is an answer."""
    if settings.per == "answers":
        return 1 / (answers.tokens_N if whole_N is None else whole_N)
    return 1 / settings.constant if settings.per == "constant" else 1.0


def _each(
    log_p_N: Tensor,
    reference_N: Tensor | None,
    advantage_N: Tensor,
    batch: Batch,
    answers: Answers,
    settings: Settings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return w_t · l_t + beta · kl_t as a function of log p, and the means to tell."""
    now_N = log_p_N.detach()
    before_N = None if settings.against == "sampler" else _extra(batch, "trainer_log_p")
    before_N = now_N if before_N is None else before_N
    q_N = before_N
    if settings.against == "sampler":
        q_N = _needed(batch, "sampler_log_p", "a ratio against the sampler")
    each_N, cut_N = LOSSES[settings.loss](Tokens(log_p_N, q_N, advantage_N, answers), settings.bounds)
    means = {"ratio": (now_N - q_N).exp(), "clip_fraction": cut_N}

    if (settings.correction.weigh, settings.correction.mask) != ("none", "none"):
        drift_N = before_N - _needed(batch, "sampler_log_p", "a correction")
        factor_N = settings.correction.weights(drift_N, answers)
        each_N, means["masked"] = factor_N * each_N, factor_N.eq(0)
    if reference_N is not None:
        kl_N = KL[settings.kl](log_p_N, reference_N)
        each_N, means["kl"] = each_N + settings.beta * kl_N, kl_N.detach()
    return each_N, means


def _extra(batch: Batch, name: str) -> Tensor | None:
    """One of the batch's extras at its sampled tokens, float64 [N]."""
    values_T = batch.extras.get(name)
    return None if values_T is None else values_T.index_select(0, batch.supervised()).double()


def _needed(batch: Batch, name: str, for_: str) -> Tensor:
    values_N = _extra(batch, name)
    if values_N is None:
        raise ValueError(f'{for_} needs batch.extras["{name}"]')
    return values_N


def _loss(
    batch: Batch,
    total: Tensor,
    log_p_N: Tensor,
    weights_N: Tensor,
    means: dict[str, Tensor],
    largest: dict[str, Tensor],
) -> Loss:
    """Join a sum and its metrics."""
    import torch

    from unfreeze.core.batch import Loss

    means = {"entropy": -log_p_N, **means}
    sampled_N = _extra(batch, "sampler_log_p")
    if sampled_N is not None and not _moved(batch):
        means["gap"] = (log_p_N - sampled_N).abs()
        largest = {**largest, "gap_max": means["gap"]}
    tokens = weights_N.sum()
    none = weights_N.new_zeros(1)  # the largest of a micro-batch without sampled tokens
    return Loss(
        sum=total,
        count=tokens if batch.examples is None else float(batch.examples),
        metrics={name: (weights_N * values_N).sum() for name, values_N in means.items()},
        metric_count=tokens,
        largest={name: torch.cat((none, values_N)).max() for name, values_N in largest.items()},
    )


def _moved(batch: Batch) -> bool:
    """True after the rollout's first update: the policy is then no longer the one that sampled."""
    return "update" in batch.documents and bool(batch.documents["update"].any())


def sampler_log_p(batch: Batch) -> Tensor:
    """Return the sampler's own log p as a Reference: KL to the policy that sampled."""
    return _needed(batch, "sampler_log_p", "KL to the sampler")
