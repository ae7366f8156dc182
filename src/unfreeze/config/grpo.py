"""Fields of `unfreeze grpo`: those of sft, the answers of a step, their reward, and the loss of a policy."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.judge import is_judge
from unfreeze.config.parse import Files, Folder, Frozen
from unfreeze.core.field import about

ADAPTER_RATE, ALL_RATE = 5e-4, 1e-6
AGENT_SECONDS = 300.0
"""Longest time of an agent, which waits for the model's answers too."""
IGNORED = {
    "training.packing": "the answers of a step are packed into as few passes as hold them",
    "data.weights": "each prompt comes once in a pass over the data",
}
"""Fields of sft that a run with rewards does not read, and why."""
OF_PROCESSES = ("grading.seconds", "grading.processes", "grading.network")
"""Fields of the processes that run a user's code."""
CLIP = {"cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}
"""Default bounds of a ratio per loss, else 0.2. GSPO's are its paper's (2507.18071); CISPO has no lower
bound, and 1 + 4 is TRL's upper one."""
CORRECT = {"icepop": (0.5, 5.0), "geometric": (0.99, 1.01)}
"""Default bounds per correction, else 0 and 2. Ling's of IcePop (2510.18855), SkyRL's of the geometric
mask."""
WEIGHTS = ("tis", "tis-sequence")
"""Corrections that only weigh."""
CLIPPED = ("ppo", "cispo", "gspo", "dppo", "rloo")
OF_LOSS = {
    "clip_low": CLIPPED,
    "clip_high": CLIPPED,
    "dual": ("ppo", "gspo", "rloo"),
    "against": (*CLIPPED, "sapo"),
}
"""Fields that only some losses have."""
OF_CORRECTION = {"correct_low": tuple(CORRECT), "correct_high": (*WEIGHTS, *CORRECT)}
"""Fields that only some corrections have."""


class Rollout(Frozen):
    """The answers that the model samples in a step."""

    prompts_per_step: int = Field(
        default=16,
        ge=1,
        description="prompts of a step; each gets a group of answers",
        json_schema_extra=about("Answers", alias="prompts_per_step", first=True),
    )
    answers: int = Field(
        default=8,
        ge=1,
        description="answers to each prompt; their rewards are compared with each other",
        json_schema_extra=about("Answers", alias="answers", first=True),
    )
    updates: int = Field(
        default=1,
        ge=1,
        description="optimizer steps on the same answers, each with its share of the prompts. Above 1 the"
        " default loss is ppo",
        json_schema_extra=about("Answers", alias="updates"),
    )
    curriculum: Literal["uniform", "hard", "adaptive"] = Field(
        default="uniform",
        description="adaptive: draw prompts whose answers had equal rewards less often. hard: leave out of a"
        " pass those that all answers solved in the last one",
        json_schema_extra=about("Answers", alias="curriculum"),
    )
    max_new_tokens: int = Field(
        default=128,
        ge=1,
        description="most tokens of an answer, over all its turns",
        json_schema_extra=about("Answers", alias="max_new_tokens", first=True),
    )
    turns: int = Field(
        default=8,
        ge=1,
        description="most turns of an answer with an environment",
        json_schema_extra=about("Answers", alias="turns"),
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="of the sampling; the loss uses the same. top-k and top-p are never used in training",
        json_schema_extra=about("Answers", alias="temperature"),
    )
    cut: Literal["mask", "score"] = Field(
        default="mask",
        description="answers that reach max_new_tokens: mask leaves them out of their group, score grades"
        " them. With an environment the default is score: a policy could escape a game into cut answers",
        json_schema_extra=about("Answers"),
    )
    resample: int = Field(
        default=1,
        ge=0,
        description="times that groups with equal rewards are replaced by other prompts of the same step",
        json_schema_extra=about("Answers"),
    )
    replay: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "training passes choose the experts that the sampler chose. auto: for a mixture of experts in"
            " bfloat16, where rounding changes choices"
        ),
        json_schema_extra=about("Answers"),
    )
    held_out_answers: int = Field(
        default=4,
        ge=1,
        description="answers to each held-out prompt at a validation, with the same seeds each time",
        json_schema_extra=about("Answers"),
    )
    keep_gb: float = Field(
        default=2.0,
        gt=0,
        description="GB of rollout files in the run's folder; above it only the worst and best of a group are"
        " kept",
        json_schema_extra=about("Answers", computes=False),
    )
    at_once: int = Field(
        default=0,
        ge=0,
        description="answers sampled at the same time; 0: all of a step. Fewer take less memory; in bfloat16"
        " rounding depends on it",
        json_schema_extra=about("Answers"),
    )


class Grading(Frozen):
    """Processes that run the reward function."""

    seconds: float = Field(
        default=10.0,
        gt=0,
        description="longest time for one answer's reward; with an agent, for its whole run: 300",
        json_schema_extra=about("Reward"),
    )
    processes: int = Field(
        default=0,
        ge=0,
        description="grading processes; 0: one for each core, at most four",
        json_schema_extra=about("Reward", computes=False),
    )
    failing: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="largest share of a step's answers without a reward (an error, a time-out); above it the"
        " run stops",
        json_schema_extra=about("Reward"),
    )
    network: bool = Field(
        default=False,
        description="let the reward function use the network",
        json_schema_extra=about("Reward"),
    )


class Policy(Frozen):
    """The loss (formulas: objectives/policy.py, objectives/ratios.py, rollout/groups.py)."""

    like: Literal[
        "", "trl", "verl", "nemo", "slime", "skyrl", "openrlhf", "prime-rl", "tinker", "nanochat"
    ] = Field(
        default="",
        description="settings of another trainer: trl, verl, nemo, slime, skyrl, openrlhf, prime-rl, tinker"
        " or nanochat",
        json_schema_extra=about("Policy", alias="like", first=True),
    )
    loss: Literal["reinforce", "ppo", "cispo", "gspo", "dppo", "sapo", "rloo"] = Field(
        default="reinforce",
        description="weight of a token once the policy has moved. reinforce has none; with updates above 1"
        " the default is ppo",
        json_schema_extra=about("Policy", alias="loss"),
    )
    clip_low: float = Field(
        default=0.2,
        ge=0,
        description="a ratio counts down to 1 - clip_low; dppo: a probability may fall by it. gspo 0.0003;"
        " cispo 1, no bound",
        json_schema_extra=about("Policy", alias="clip_low"),
    )
    clip_high: float = Field(
        default=0.2,
        gt=0,
        description="a ratio counts up to 1 + clip_high; dppo: a probability may rise by it. gspo 0.0004;"
        " cispo 4",
        json_schema_extra=about("Policy", alias="clip_high"),
    )
    dual: float | None = Field(
        default=None,
        gt=1,
        description="largest ratio of a token in a bad answer, for ppo, gspo and rloo; 3 is usual",
        json_schema_extra=about("Policy", alias="dual"),
    )
    against: Literal["sampler", "trainer"] = Field(
        default="sampler",
        description="ratios are taken against the sampler's probabilities, or against the trainer's own"
        " before the first update (one more pass)",
        json_schema_extra=about("Policy", alias="against"),
    )
    correct: Literal["none", "tis", "tis-sequence", "icepop", "geometric"] = Field(
        default="none",
        description="where trainer and sampler differ. tis: weigh tokens, or answers; icepop: also leave out"
        " tokens; geometric: leave out answers",
        json_schema_extra=about("Policy", alias="correct"),
    )
    correct_low: float = Field(
        default=0.0,
        ge=0,
        description="smallest ratio of trainer to sampler that is kept. icepop 0.5, geometric 0.99",
        json_schema_extra=about("Policy"),
    )
    correct_high: float = Field(
        default=2.0,
        gt=0,
        description="largest ratio that is kept; of tis the largest weight. tis 2, icepop 5, geometric 1.01",
        json_schema_extra=about("Policy"),
    )
    baseline: Literal["mean", "leave-one-out", "ema", "greedy"] = Field(
        default="mean",
        description="subtracted from a reward: mean of its group, of its other answers, of earlier steps, or"
        " the greedy answer's reward",
        json_schema_extra=about("Policy", alias="baseline"),
    )
    scale: Literal["group", "batch", "none"] = Field(
        default="none",
        description="advantages are divided by the rewards' standard deviation in a group, in a step, or not",
        json_schema_extra=about("Policy", alias="scale"),
    )
    per: Literal["tokens", "answers", "constant"] = Field(
        default="tokens",
        description="mean over: all tokens of a step, the tokens of each answer, or max_new_tokens. With gspo"
        " the default is answers",
        json_schema_extra=about("Policy", alias="per"),
    )
    kl: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="estimator of the distance to the model as it began",
        json_schema_extra=about("Policy", alias="kl"),
    )
    beta: float = Field(
        default=0.0,
        ge=0,
        description="weight of that distance; 0: none. 0.001 to 0.04 keep answers near the start",
        json_schema_extra=about("Policy", alias="beta"),
    )


class Data(sft.Data):
    """Rows with prompts; further columns go to the reward function."""

    files: Files = Field(
        min_length=1,
        description=(
            "files of rows with a prompt (.jsonl .json .csv .parquet .arrow; prompt, question, instruction,"
            " or messages). An answer in the row is not shown to the model; every column goes to the reward"
        ),
        json_schema_extra=about("Model and data", alias="data", first=True),
    )
    truncation: Literal["error", "drop"] = Field(
        default="error",
        description="prompts that leave no room for an answer within sequence_length: stop, or drop the row",
        json_schema_extra=about("How long", was="truncation"),
    )


class Optimizer(sft.Optimizer):
    """Optimizer with default learning rates for rewards, and a constant schedule."""

    learning_rate: float = Field(
        default=ADAPTER_RATE, gt=0, description="peak learning rate; with train = all the default is 1e-6"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd", "one_cycle"] = Field(
        default="constant",
        description="decay of the learning rate after warm-up",
        json_schema_extra=about("Learning", was="schedule"),
    )


class Config(sft.Config):
    """All fields of a run with rewards."""

    OF_TOKENS: ClassVar[str] = "at most in a training pass"

    reward: Folder = Field(
        default="",
        description="Python file with reward(prompt, completion, **row) -> number or dict of parts;"
        " my.py:name picks another function. judge.toml asks a model",
        json_schema_extra=about("Reward", first=True),
    )
    env: Folder = Field(
        default="",
        description="Python file with an environment, my.py:Class: reset(**row), typed methods as tools,"
        " get_reward()",
        json_schema_extra=about("Reward", alias="env", first=True),
    )
    agent: Folder = Field(
        default="",
        description="Python file with async run(base_url, row) -> reward, which asks the model at base_url as"
        " an OpenAI client does; my.py:name picks another function",
        json_schema_extra=about("Reward", alias="agent", first=True),
    )
    data: Data
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    grading: Grading = Grading()
    policy: Policy = Policy()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As in sft, with the learning rate of a policy."""
        sources = [name for name in ("reward", "env", "agent") if fields.get(name)]
        if not sources:
            raise ValueError(
                "reward is missing: give --reward my.py, a file with a function reward; or --env my.py:Class;"
                " or --agent my.py"
            )
        if "agent" in sources and len(sources) > 1:
            raise ValueError(f"agent returns the reward itself; leave out {sources[0]}")
        if not fields.get("env") and "rollout.turns" in fields:
            raise ValueError("rollout.turns has no meaning without an environment; give --env my.py:Class")
        no_code = is_judge(fields.get("reward")) and not fields.get("env")
        if own := [name for name in OF_PROCESSES if no_code and name in fields]:
            raise ValueError(
                f"{own[0]} has no meaning with a judge, which runs no code here; leave it out, or set timeout"
                " in its file"
            )
        for name, why in IGNORED.items():
            if name in fields:
                raise ValueError(f"{name} has no meaning here: {why}; leave it out")
        baseline, like = fields.get("policy.baseline", "mean"), fields.get("policy.like")
        if fields.get("rollout.answers", 8) == 1 and baseline in ("mean", "leave-one-out"):
            raise ValueError(
                "answers = 1: a group of one has nothing to compare its reward with; give --answers 8"
                + ("" if like else ", or --baseline ema")
            )
        if like:
            own = [f"policy.{name}" for name in Policy.model_fields if name != "like"]
            if both := [name for name in own if name in fields]:
                raise ValueError(f"policy.like sets {', '.join(both)}: give only one of them")
        rate = ALL_RATE if fields.get("train") == "all" else ADAPTER_RATE
        own = {"optimizer.learning_rate": rate} | ({} if like else _of_loss(fields))
        own |= {"grading.seconds": AGENT_SECONDS} if fields.get("agent") else {}
        own |= {"rollout.cut": "score"} if fields.get("env") else {}
        _refuse_updates(own | fields)
        return super().completed({**own, **fields})


def _of_loss(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the loss, its bounds and those of the correction, as they are by default with these fields.

    Raises ValueError for a field of another loss or correction.
    """
    loss = fields.get("policy.loss", "ppo" if _several(fields) else "reinforce")
    correct = fields.get("policy.correct", "none")
    for of, kind, only in (("loss", loss, OF_LOSS), ("correct", correct, OF_CORRECTION)):
        for name, kinds in only.items():
            if f"policy.{name}" in fields and kind not in kinds:
                raise ValueError(
                    f"policy.{name} has no meaning with {of} = {kind}: it is for {', '.join(kinds)}; leave it"
                    f" out, or change {of}"
                )
    against = fields.get("policy.against", "sampler")
    if loss != "reinforce" and against == "sampler" and correct in WEIGHTS:
        raise ValueError(
            f"correct = {correct} with ratios against the sampler would weigh tokens twice: add --against"
            " trainer, or leave correct out"
        )
    clip, kept = CLIP.get(str(loss), (0.2, 0.2)), CORRECT.get(str(correct), (0.0, 2.0))
    band = [
        fields.get(f"policy.correct_{end}", value) for end, value in zip(("low", "high"), kept, strict=True)
    ]
    low, high = (each if isinstance(each, int | float) else None for each in band)
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"correct_low = {low:g} is not below correct_high = {high:g}: every token would be left out; give"
            f" --policy.correct-low {kept[0]:g}, or a higher --policy.correct-high"
        )
    names = "loss", "per", "clip_low", "clip_high", "correct_low", "correct_high"
    per = "answers" if loss == "gspo" else "tokens"  # gspo's paper (2507.18071) means over answers
    return {f"policy.{name}": value for name, value in zip(names, (loss, per, *clip, *kept), strict=True)}


def _several(fields: dict[str, Any]) -> bool:
    """Return True for more than one update. A value of another type is refused later, with its field."""
    updates = fields.get("rollout.updates", 1)
    return isinstance(updates, int) and updates > 1


def _refuse_updates(fields: dict[str, Any]) -> None:
    """Raise ValueError for updates without prompts, or with a loss that ignores how the policy has moved."""
    if not _several(fields):
        return
    updates, prompts = fields["rollout.updates"], fields.get("rollout.prompts_per_step", 16)
    if isinstance(prompts, int) and updates > prompts:
        raise ValueError(
            f"updates = {updates}, but a step has {prompts} prompts to share among them: give"
            f" --prompts-per-step {updates} or more"
        )
    if fields.get("policy.like") == "nanochat":
        raise ValueError(
            f"nanochat updates once per rollout, since its loss has no ratio: leave updates = {updates} out"
        )
    correct = fields.get("policy.correct", "none")
    if fields.get("policy.loss") == "reinforce" and correct in ("none", "geometric"):  # neither weighs
        raise ValueError(
            f"loss = reinforce with updates = {updates}: after the first the policy is not the one that"
            " sampled; add --correct tis, or leave loss out"
        )
