"""A run with rewards: its graders, the source of its steps, its loss, and the measure of held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.grpo import Config
from unfreeze.config.judge import JudgeConfig, is_judge, read_judge
from unfreeze.core.errors import ConfigError
from unfreeze.job.opening.device import say
from unfreeze.rollout.like import LIKE, Preset
from unfreeze.rollout.user_code import UserCode, user_code
from unfreeze.teach.reference import AsBegun, asked
from unfreeze.train.interrupt import Interrupt

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss
    from unfreeze.data import Cursor
    from unfreeze.evaluate.rewarded import Rewarded
    from unfreeze.generate.engine import Engine
    from unfreeze.job.agents import ByAgents
    from unfreeze.job.judge import Judge
    from unfreeze.job.setup import EncodedData, Placed, Setup
    from unfreeze.kernels.linear_cross_entropy import Words
    from unfreeze.models import Decoder
    from unfreeze.objectives.ratios import Correction
    from unfreeze.parallel.answers import Answers
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.report.rollouts.watched import Watched
    from unfreeze.report.rollouts.writer import Rollouts as Files
    from unfreeze.rollout.answering import Answering, Grade
    from unfreeze.rollout.environment import Environments
    from unfreeze.rollout.graders import Graders
    from unfreeze.rollout.prompts import Rows
    from unfreeze.rollout.reward import Graded
    from unfreeze.rollout.rollouts import Rolled, Rollouts, Settings
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
        sources = {"reward": (config.reward, "reward"), "env": (config.env, "Environment")}
        sources["agent"] = (config.agent, "run")
        self.judge = read_judge(config.reward) if is_judge(config.reward) else None
        self.codes: dict[str, tuple[UserCode | JudgeConfig, ...]] = {
            field: (self.judge,) if self.judge and field == "reward" else user_code(*each, field)
            for field, each in sources.items()
            if each[0]
        }
        self.words: Words | None = None
        self.graders: Graders | Judge | None = None
        self.environments: Environments | None = None
        self.agents: ByAgents | None = None
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
        self.identity = {
            **{field: "-".join(code.digest for code in codes) for field, codes in self.codes.items()},
            "fingerprint": rows.dataset.examples.fingerprint(),
        }
        for name, value in self.identity.items() if setup.folder.cursor else ():
            if (before := (setup.folder.cursor or {}).get(name)) != value:
                of = getattr(self.config, name, "the data")
                raise ConfigError(
                    f"cannot resume: {of} has changed since this run began ({name} was {before!r}, is"
                    f" {value!r})",
                    next=f"restore {of}, or start a new run with another --out",
                )

        def start() -> None:
            self._start(setup)
            for files in filter(None, (data.files, data.held_out)):
                if self.graders is not None:
                    self.graders.check(self._rows(files))
                if self.environments is not None:
                    self.environments.check(self._rows(files))

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
        for each in filter(None, (self.graders, self.environments, self.agents)):
            each.close()

    def source(self, setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None) -> Rollouts:
        """The steps: prompts in shuffled order, answers of the model as it is."""
        from unfreeze.data.packing.order import Shuffled
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
        stops = partial(self.grade, stop=lambda: self.interrupt.requested)
        how = self._answering(setup, engine, settings, stops)
        self.how = how if config.agent else self._answering(setup, engine, settings, self.grade)
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

    def _start(self, setup: Setup) -> None:
        """Start the processes that run the user's code."""
        from unfreeze.data.tokens.tool_calls import reads_calls
        from unfreeze.rollout.environment import Environments
        from unfreeze.rollout.graders import Graders, Limits

        config, grading = self.config, self.config.grading
        limits = Limits(seconds=grading.seconds, network=grading.network)
        if config.agent:
            from unfreeze.job.agents import ByAgents

            self.agents = ByAgents(config.agent, limits, count=grading.processes, say=say(setup.common))
        if config.env:
            reads_calls(setup.tokenizer.chat.source)  # refuses a template without calls of tools
            turns, count = config.rollout.turns, grading.processes
            self.environments = Environments(
                config.env, limits, most_turns=turns, count=count, say=say(setup.common)
            )
            self.environments.check_reward(config.reward)
        if self.judge and setup.group.rank == 0:
            from unfreeze.job.judge import FOLDER, Judge

            self.graders = Judge(self.judge, setup.folder.path / FOLDER)
        elif config.reward and setup.group.rank == 0:
            self.graders = Graders(config.reward, limits, count=grading.processes, say=say(setup.common))

    def _answering(self, setup: Setup, engine: Engine, settings: Settings, grade: Grade) -> Answering:
        """Return how prompts are answered: in one turn, or with an environment."""
        from unfreeze.job.setup import longest_of
        from unfreeze.rollout.answering import InOneTurn
        from unfreeze.rollout.talks import Talks

        group = setup.group
        if self.config.agent:
            if group.lockstep:
                raise ConfigError(
                    "agents ask each process on its own, and here the processes share the weights",
                    next="--place.weights device --place.rest device, or one process",
                )
            if self.agents is None:  # process 0 has started its own
                self._start(setup)
            assert self.agents is not None
            return self.agents.begin(engine, setup.tokenizer, settings, longest_of(setup))
        if not self.config.env:
            return InOneTurn(engine, grade, settings)
        if self.environments is None and not group.lockstep:
            self._start(setup)  # process 0 has checked it before
        return Talks(
            engine,
            setup.tokenizer,
            self.environments,
            settings,
            window=longest_of(setup),
            group=group,
            grade=grade if self.config.reward else None,
        )

    def grade(self, answers: Sequence[Any], stop: Callable[[], bool] = lambda: False) -> list[Graded]:
        """Rewards of (row, text); in process 0 only."""
        assert self.graders is not None
        return self.graders.grade(answers, failing=self.config.grading.failing, stop=stop)

    def heldout(
        self, model: Decoder, batches: Iterable[Batch], group: Group, *, objective: object
    ) -> Rewarded:
        """Mean reward of several answers to each held-out prompt (evaluate/rewarded.py)."""
        from unfreeze.evaluate.rewarded import Asking, rewarded
        from unfreeze.rollout.answering import Asked, rewards, sampled

        how, held_out, rollout = self.how, self.held_out, self.config.rollout
        assert how is not None and held_out is not None
        row_of = self._rows(self.held_out_files).of

        def answer(prompts: Sequence[Any], each: int) -> list[tuple[float | None, int]]:
            questions = [Asked(example, row_of(example), key) for example, key in prompts]
            every = sampled(how, questions, each, group)
            flat = [(one.row, done) for one, mine in zip(questions, every, strict=True) for done in mine]
            graded = rewards(how, flat, group)
            return [(worth.reward, len(done.tokens)) for worth, (_, done) in zip(graded, flat, strict=True)]

        asking = Asking(rollout.held_out_answers, self.config.seed, self.config.grading.failing)
        return rewarded(held_out, answer, asking)

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
            f"updates: {rollout.updates} for each step's answers, a share of the prompts in each; after the"
            " first the policy has moved, hence ratios"
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
