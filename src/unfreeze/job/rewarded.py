"""A run with rewards: its graders, the source of its steps, its loss, and the measure of held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.grpo import Config
from unfreeze.core.errors import ConfigError
from unfreeze.job.opening.device import say
from unfreeze.job.reward_code import RewardCode, measured
from unfreeze.rollout.like import LIKE, Preset
from unfreeze.teach.reference import AsBegun, asked
from unfreeze.train.interrupt import Interrupt

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.config.judge import JudgeConfig
    from unfreeze.core.batch import Batch, Loss
    from unfreeze.data import Cursor
    from unfreeze.evaluate.rewarded import Rewarded
    from unfreeze.job.setup import EncodedData, Placed, Setup
    from unfreeze.kernels.linear_cross_entropy import Words
    from unfreeze.models import Decoder
    from unfreeze.objectives.ratios import Correction
    from unfreeze.parallel.answers import Answers
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.report.rollouts.watched import Watched
    from unfreeze.report.rollouts.writer import Rollouts as Files
    from unfreeze.rollout.answering import Answering
    from unfreeze.rollout.prompts import Rows
    from unfreeze.rollout.rollouts import Rolled, Rollouts
    from unfreeze.teach.second import Second
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


SILENT = (5, 20, 100)
"""Numbers of steps without a signal, in a row, at which a run warns."""


class Rewarding:
    """The parts of a run whose loss comes from rewards.

    words   that the sampler draws from; known once the engine is there
    """

    def __init__(self, config: Config):
        self.config = config
        self.code = RewardCode(config)
        self.judge = self.code.judge
        self.words: Words | None = None
        self.how: Answering | None = None
        self.warned = False  # of the gap
        self.silent = 0  # steps without a signal, up to now
        self.interrupt = Interrupt()
        self.canaries: Watched | None = None  # in process 0

    @property
    def at_once(self) -> int:
        """Answers sampled at the same time. Not by free memory: in bfloat16 rounding depends on it."""
        rollout = self.config.rollout
        return rollout.at_once or rollout.prompts_per_step * rollout.answers

    @cached_property
    def preset(self) -> Preset:
        """Advantage and loss: those of `like`, or of the single fields."""
        from unfreeze.objectives.policy import Settings
        from unfreeze.objectives.ratios import Bounds
        from unfreeze.rollout.groups import Advantage

        policy = self.config.policy
        if policy.like:
            return LIKE[policy.like]
        settings = Settings(
            policy.loss,
            Bounds(policy.clip_low, policy.clip_high, policy.dual),
            policy.against,
            self._correction,
            per=policy.per,
            constant=float(self.config.rollout.max_new_tokens),
            kl=policy.kl,
            beta=policy.beta,
        )
        return Preset(
            Advantage(policy.baseline, policy.scale), settings, "begun" if policy.beta else "none", ""
        )

    @property
    def _correction(self) -> Correction:
        """A ratio against the sampler is a weight already, so the correction then only masks."""
        from unfreeze.objectives.ratios import CORRECTIONS, Correction

        policy = self.config.policy
        weigh, mask = CORRECTIONS[policy.correct]
        if policy.loss != "reinforce" and policy.against == "sampler":
            weigh = "none"
        low, high = policy.correct_low, policy.correct_high
        return Correction(weigh, high, mask, (low, high))

    def objective(
        self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, *, reference: Any = None
    ) -> Loss:
        """Loss of a step's answers (objectives/policy.py)."""
        from unfreeze.objectives.policy import policy, sampler_log_p

        if self.preset.reference == "sampler":
            reference = sampler_log_p
        return policy(hidden_TD, lm_head, batch, self.preset.policy, reference=reference, words=self.words)

    def second(self) -> Second | None:
        """The model as it began, for KL; None without it."""
        if self.preset.reference != "begun":
            return None
        config = self.config
        kind = "copy" if config.lora is None else "adapters" if config.adapter else "base"

        def minimise(reference: Any) -> Any:
            return partial(self.objective, reference=reference)

        beta = self.preset.policy.beta
        return AsBegun(kind, minimise, loss=f"KL {self.preset.policy.kl}, beta {beta:g}", measure=self._log_p)

    def _log_p(self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch) -> Tensor:
        """Return log p of each supervised target, over the sampler's words; no gradient."""
        from unfreeze.objectives.log_p import token_log_p

        return token_log_p(hidden_TD, lm_head, batch, words=self.words)

    def check(self, setup: Setup, rows: EncodedData) -> None:
        """Start the graders in process 0, and refuse rows that the reward cannot take, before any weight is
        loaded."""
        data = setup.config.data
        self.identity = {**self.code.digests, "fingerprint": rows.dataset.examples.fingerprint()}
        for name, value in self.identity.items() if setup.folder.cursor else ():
            if (before := (setup.folder.cursor or {}).get(name)) != value:
                of = getattr(self.config, name, "the data")
                raise ConfigError(
                    f"cannot resume: {of} has changed since this run began ({name} was {before!r}, is"
                    f" {value!r})",
                    next=f"restore {of}, or start a new run with another --out",
                )

        def start() -> None:
            self.code.start(setup.tokenizer, say(setup.common), setup.folder.path)
            for files in filter(None, (data.files, data.held_out)):
                self.code.check(self._rows(files))

        self.held_out = rows.dataset.validation
        if self.judge and self.held_out is not None and len(self.held_out):
            from unfreeze.job.judge import refuse_held_out

            refuse_held_out(self.judge)
        setup.group.on_rank0(start)
        self.held_out_files = data.held_out or data.files

    def watch_gap(self, state: State, result: StepResult) -> None:
        """Warn once if trainer and sampler differ by more than rounding explains; bfloat16 hides it."""
        from unfreeze.evaluate.gap import TOLERANCE

        gap = result.metrics.get("gap_max", 0.0)
        if gap <= TOLERANCE or self.warned or state.model.dtype.itemsize < 4:
            return
        self.warned = True
        state.run.events.emit(
            "warning",
            state.step,
            message=f"trainer and sampler differ by {gap:.2g} nats at a token, so they do not compute the"
            f" same (limit {TOLERANCE:g} in float32)",
        )

    def close(self) -> None:
        """End the graders: in a notebook the process goes on after the run."""
        self.code.close()

    def source(self, setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None) -> Rollouts:
        """The steps: prompts in shuffled order, answers of the model as it is."""
        from unfreeze.data.packing.order import Shuffled
        from unfreeze.job.setup import longest_of
        from unfreeze.kernels.linear_cross_entropy import Words
        from unfreeze.report.rollouts.watched import Watched
        from unfreeze.report.rollouts.writer import Rollouts as Files
        from unfreeze.rollout.rollouts import Rollouts, Settings
        from unfreeze.train.state import kept_of

        config, rollout = self.config, self.config.rollout
        engine = at.speaker.engine
        self.words = Words(engine.num_ids, rollout.temperature)
        bf16 = at.model.dtype.itemsize == 2
        replay = bf16 and bool(at.model.moe_layers()) if rollout.replay == "auto" else rollout.replay == "on"
        settings = Settings(
            prompts=rollout.prompts_per_step,
            answers=rollout.answers,
            new_tokens=rollout.max_new_tokens,
            seed=config.seed,
            updates=rollout.updates,
            curriculum=rollout.curriculum,
            temperature=rollout.temperature,
            score_cut=rollout.cut == "score",
            resample=rollout.resample,
            replay=replay,
            at_once=self.at_once,
            failing=config.grading.failing,
            passes=setup.group.size,
            micro_batch=config.tokens_per_micro_batch,
            advantage=self.preset.advantage,
            per=self.preset.policy.per,
            every_answer=bool(self.preset.policy.beta),
            look=f"unfreeze report {setup.folder.path}" if config.agent else "",
            about=self.identity,
        )
        examples = rows.dataset.examples
        files = None
        if setup.group.rank == 0:
            files = Files(setup.folder.path, rollout.keep_gb * 1e9)
            files.drop_after(setup.folder.step)
            self.canaries = Watched(setup.folder.path)
        tell = partial(self._tell, setup, at, files)
        before = self.preset.policy.against == "trainer" and rollout.updates > 1

        def stop() -> bool:
            return self.interrupt.requested

        answering = partial(
            self.code.answering,
            engine,
            setup.tokenizer,
            settings,
            group=setup.group,
            window=longest_of(setup),
            say=say(setup.common),
        )
        how = answering(partial(self.code.grade, stop=stop), stop=stop)
        agents = self.code.agents
        self.how = answering(self.code.grade) if agents is None else agents.to_the_end()
        self.rollouts = Rollouts(
            how,
            examples,
            self._rows(setup.config.data.files).of,
            settings,
            order=Shuffled(len(examples), config.seed),
            group=setup.group,
            tell=tell,
            measure=partial(self._now, at.model) if before else None,
            start=start,
        )
        self.rollouts.go_on(kept_of(setup.folder))
        return self.rollouts

    def kept(self, cursor: Cursor) -> dict[str, Tensor]:
        """Return what a save needs besides the cursor: the updates that follow in its rollout."""
        return self.rollouts.kept(cursor)

    def _now(self, model: Decoder, batch: Batch) -> Tensor:
        """Return log p of each supervised target as the model is now, on the host."""
        return asked(model, None, batch.to(model.device), self._log_p).cpu()

    def heldout(
        self, model: Decoder, batches: Iterable[Batch], group: Group, *, objective: object
    ) -> Rewarded:
        """Measure the mean reward of held-out prompts (evaluate/rewarded.py)."""
        from unfreeze.evaluate.rewarded import Asking

        how, held_out, rollout = self.how, self.held_out, self.config.rollout
        assert how is not None and held_out is not None
        asking = Asking(rollout.held_out_answers, self.config.seed, self.config.grading.failing)
        return measured(how, held_out, self._rows(self.held_out_files).of, asking, group)

    def answers(self, tokens: int, each: int, longest: int, documents: int) -> Answers:
        """Rows and positions of the cache while a step is sampled (generate/engine.py), and the step.

        From the second turn on each answer has a prompt of its own. What tools say and their schemas are not
        known yet.
        """
        from unfreeze.parallel.answers import Answers, OfStep

        rollout, training = self.config.rollout, self.config.training
        rows = min(self.at_once, rollout.prompts_per_step * rollout.answers)
        prompts = min(rollout.prompts_per_step, 2 * -(-rows // rollout.answers))
        prompt, mean = (max(1, length - rollout.max_new_tokens) for length in (longest, each))
        rollouts = math.ceil(training.epochs * documents / rollout.prompts_per_step)
        steps = training.steps or rollouts * rollout.updates or None
        each_step, new = rollout.prompts_per_step // rollout.updates, rollout.max_new_tokens
        step = OfStep(each_step * rollout.answers, new, each_step, mean, steps)
        positions = rows * longest if self.config.env else rows * new + prompts * prompt
        return Answers(rows, positions, step)

    def _tell(self, setup: Setup, at: Placed, files: Files | None, rolled: Rolled) -> None:
        """Write a step's event, and its rollout file in process 0."""
        from unfreeze.rollout.rollouts import counted, lines
        from unfreeze.rollout.verdicts import AGREEMENT

        numbers = counted(rolled)
        if self.judge and self.judge.mode == "pairs":
            numbers["agreement"] = numbers["parts"].get(AGREEMENT)
        setup.folder.events.emit("rollout", rolled.step, **numbers)
        self.silent = 0 if bool(rolled.groups.signal_P.any()) else self.silent + 1
        if self.silent in SILENT:
            setup.folder.events.emit(
                "warning",
                rolled.step,
                message=f"{self.silent} steps in a row have no group with different rewards, so nothing is"
                f" learned; {100 * numbers['cut']:.0f} % of the answers were cut (see rollouts.html)",
            )
        if files is None or self.canaries is None:
            return
        answers = lines(rolled, setup.tokenizer)
        warnings = self.canaries.look(rolled.step, answers)
        try:
            full = files.write(rolled.step, answers)
        except OSError as error:  # they are for reading: training goes on
            full = f"the answers of step {rolled.step:,} were not kept: {error.strerror or error}"
        for warning in [*warnings, *([full] if full else [])]:
            setup.folder.events.emit("warning", rolled.step, message=warning)

    @cached_property
    def _read(self) -> dict[tuple[str, ...], Rows]:
        return {}

    def _rows(self, files: Sequence[str]) -> Rows:
        """The rows of these files, read once."""
        from unfreeze.rollout.prompts import Rows

        name = tuple(files)
        if name not in self._read:
            self._read[name] = Rows(files, self.config.data.columns)
        return self._read[name]


def lines_of(preset: Preset, config: Config, judge: JudgeConfig | None) -> list[str]:
    """Lines of the start: how answers are rewarded and what is minimised."""
    rollout, policy, advantage = config.rollout, preset.policy, preset.advantage
    ratios = "" if policy.loss == "reinforce" else f" (ratios against the {policy.against})"
    loss = [policy.loss + ratios, f"advantage: reward less {advantage.baseline}"]
    loss += [f"corrected by {config.policy.correct}"] * (config.policy.correct != "none")
    loss += [f"over the spread of the {advantage.scale}"] * (advantage.scale != "none")
    loss += [f"KL {policy.kl}, beta {policy.beta:g}"] * bool(policy.beta)
    lines = [
        f"answers: {rollout.prompts_per_step} prompts × {rollout.answers} a step, at most"
        f" {rollout.max_new_tokens} tokens{_graded_by(config)}",
        f"loss: {', '.join(loss)}, per {policy.per}",
    ]
    if judge:
        from unfreeze.job.judge import line_of

        lines.insert(1, line_of(judge, rollout, advantage.baseline == "greedy"))
    if rollout.updates > 1:
        lines.append(
            f"updates: {rollout.updates} optimizer steps on the answers of a rollout, each on a share;"
            " tokens are weighed by how far the model has moved"
        )
    if config.policy.like:
        lines.append(f"like {config.policy.like}: {preset.differs}")
    return lines


def _graded_by(config: Config) -> str:
    """'; at most 8 turns with my.py:Calculator; reward: my.py'."""
    if config.agent:
        return f" a request; agent: {config.agent}"
    env = f"; at most {config.rollout.turns} turns with {config.env}" if config.env else ""
    return env + (f"; reward: {config.reward}" if config.reward else "")
