"""Reward, judge, environment or agent of a run, in processes of its own; how prompts are answered with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unfreeze.config.grpo import Grading, Rollout
from unfreeze.config.judge import JudgeConfig, is_judge, read_judge
from unfreeze.core.errors import ConfigError
from unfreeze.rollout.user_code import UserCode, user_code

if TYPE_CHECKING:
    from unfreeze.data import Tokenizer
    from unfreeze.data.rows.row import Conversation
    from unfreeze.data.store.examples import Example
    from unfreeze.evaluate.rewarded import Asking, Rewarded
    from unfreeze.generate.engine import Engine
    from unfreeze.job.agents import ByAgents
    from unfreeze.job.judge import Judge
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.rollout.answering import Answering, Grade
    from unfreeze.rollout.environment import Environments
    from unfreeze.rollout.graders import Graders
    from unfreeze.rollout.reward import Graded
    from unfreeze.rollout.rollouts import Settings

Say = Callable[[str], None]


class Fields(Protocol):
    """The fields of `unfreeze grpo` that are read here."""

    @property
    def reward(self) -> str: ...
    @property
    def env(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def rollout(self) -> Rollout: ...
    @property
    def grading(self) -> Grading: ...


class RewardCode:
    """The user's code. Its text is read here, its processes begin with `start`.

    Raises ConfigError for a file that is missing or has a syntax error.
    """

    def __init__(self, config: Fields):
        self.config = config
        sources = {"reward": (config.reward, "reward"), "env": (config.env, "Environment")}
        sources["agent"] = (config.agent, "run")
        self.judge = read_judge(config.reward) if is_judge(config.reward) else None
        self.codes: dict[str, tuple[UserCode | JudgeConfig, ...]] = {
            field: (self.judge,) if self.judge and field == "reward" else user_code(*each, field)
            for field, each in sources.items()
            if each[0]
        }
        self.graders: Graders | Judge | None = None
        self.environments: Environments | None = None
        self.agents: ByAgents | None = None

    @property
    def digests(self) -> dict[str, str]:
        """Return field -> hash of its files."""
        return {field: "-".join(code.digest for code in codes) for field, codes in self.codes.items()}

    def start(
        self, tokenizer: Tokenizer, say: Say, folder: Path | None = None, *, grades: bool = True
    ) -> None:
        """Start the processes.

        folder  of the run, for a judge's verdicts and cost
        grades  functions of --reward, or its judge, too
        """
        from unfreeze.data.tokens.tool_calls import reads_calls
        from unfreeze.rollout.environment import Environments
        from unfreeze.rollout.graders import Graders, Limits

        config, grading = self.config, self.config.grading
        limits = Limits(seconds=grading.seconds, network=grading.network)
        if config.agent:
            from unfreeze.job.agents import ByAgents

            self.agents = ByAgents(config.agent, limits, count=grading.processes, say=say)
        if config.env:
            reads_calls(tokenizer.chat.source)  # refuses a template without calls of tools
            turns, count = config.rollout.turns, grading.processes
            self.environments = Environments(config.env, limits, most_turns=turns, count=count, say=say)
            self.environments.check_reward(config.reward)
        if self.judge and grades:
            from unfreeze.job.judge import FOLDER, Judge

            assert folder is not None
            self.graders = Judge(self.judge, folder / FOLDER)
        elif config.reward and grades:
            self.graders = Graders(config.reward, limits, count=grading.processes, say=say)

    def check(self, rows: Iterable[Conversation]) -> None:
        """Raise ConfigError or DataError for the first row that the code cannot take."""
        rows = list(rows)
        for each in filter(None, (self.graders, self.environments)):
            each.check(rows)

    def close(self) -> None:
        """End the processes: in a notebook the process goes on after the run."""
        for each in filter(None, (self.graders, self.environments, self.agents)):
            each.close()

    def answering(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        grade: Grade,
        group: Group,
        *,
        window: int,
        say: Say,
        stop: Callable[[], bool] = lambda: False,
    ) -> Answering:
        """Return how prompts are answered: in one turn, with an environment, or by an agent.

        window: most ids of a sample, fed and sampled
        stop: asked while agents or environments run; True leaves the step (StepLeft)
        """
        from unfreeze.rollout.answering import InOneTurn
        from unfreeze.rollout.talks import Talks

        if self.config.agent:
            if group.lockstep:
                raise ConfigError(
                    "agents ask each process on its own, and here the processes share the weights",
                    next="--place.weights device --place.rest device, or one process",
                )
            if self.agents is None:  # process 0 has started its own
                self.start(tokenizer, say, grades=group.rank == 0)
            assert self.agents is not None
            return self.agents.begin(engine, tokenizer, settings, window, stop)
        if not self.config.env:
            return InOneTurn(engine, grade, settings)
        if self.environments is None and not group.lockstep:  # process 0 has checked it before
            self.start(tokenizer, say, grades=group.rank == 0)
        own, world = grade if self.config.reward else None, self.environments
        return Talks(engine, tokenizer, world, settings, window=window, group=group, grade=own, stop=stop)

    def grade(self, answers: Sequence[Any], stop: Callable[[], bool] = lambda: False) -> list[Graded]:
        """Return the rewards of (row, text); in process 0 only."""
        assert self.graders is not None
        return self.graders.grade(answers, failing=self.config.grading.failing, stop=stop)


def measured(
    how: Answering,
    prompts: Sequence[Example],
    row_of: Callable[[Example], Conversation],
    asking: Asking,
    group: Group,
) -> Rewarded:
    """Return the rewards of several answers to each held-out prompt (evaluate/rewarded.py)."""
    from unfreeze.evaluate.rewarded import rewarded
    from unfreeze.rollout.answering import Asked, rewards, sampled

    def answer(prompts: Sequence[Any], each: int) -> list[tuple[float | None, int]]:
        questions = [Asked(example, row_of(example), key) for example, key in prompts]
        every = sampled(how, questions, each, group)
        flat = [(one.row, done) for one, mine in zip(questions, every, strict=True) for done in mine]
        graded = rewards(how, flat, group)
        return [(worth.reward, len(done.tokens)) for worth, (_, done) in zip(graded, flat, strict=True)]

    return rewarded(prompts, answer, asking)
