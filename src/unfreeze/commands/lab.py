"""unfreeze lab study.toml: arms × seeds at equal FLOPs, and an answer with intervals.

The file has a question and arms: flags for one training command, or for a script. Every arm is run with every
seed, and compared with the first arm seed by seed. The same command again continues: finished runs stay, and
the one that was interrupted resumes. lab.html has curves, the table, and the answer in a sentence.
"""

from __future__ import annotations

import datetime
import os
import resource
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.lab_cost import Cost, cost_of, equal_steps, refuse_unequal
from unfreeze.commands.lab_runs import Run, diverged, main_runs, measured, tuning_runs
from unfreeze.commands.lab_table import Answer, answer_of, page_of, printed, results_of
from unfreeze.commands.staged import STOP, Launch, Stopped, alone, by_script, has_files, keep, launch, told
from unfreeze.config.lab import Lab, read_lab
from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.cpu import cpu_class
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_flops, format_seconds
from unfreeze.report.lab import write_lab
from unfreeze.report.tables import ABSENT
from unfreeze.untrusted.json_object import read_object

RECORD, PAGE = "lab.json", "lab.html"
START = 8.0
"""Seconds of a small run beside its steps: imports, compiling, validation (two vCPUs of a server)."""
SHARE = 0.5
"""Share of the rate of one matrix product that a small model's training step reaches on a CPU."""


class Config(Frozen):
    file: Annotated[Folder, Positional, arg(metavar="STUDY.toml")] = Field(
        description="file with the question and the arms"
    )
    out: Folder = Field(default="", description="folder for everything; default: the file's")
    dry_run: bool = Field(default=False, description="print runs, FLOPs and minutes, run nothing")
    list: bool = Field(default=False, description="print the ledger of runs, run nothing")
    results: Folder = Field(default="", description="folder for NAME.json with the answer, date and machine")


def main(arguments: list[str], common: Common, launch: Launch = launch) -> dict[str, Any]:
    """Run what is left of the study and write the page.

    -> question, sentence, ranking, arms (rows of the table), runs, out, page, finished.
    """
    config = parse(Config, arguments, command="lab", description=__doc__ or "", positional=True)
    lab = read_lab(Path(config.file), config.out)
    again = shlex.join(["unfreeze", "lab", *arguments])
    if not (config.list or config.dry_run):
        with writing(Path(lab.out), "out"):
            Path(lab.out).mkdir(parents=True, exist_ok=True)
        with alone(Path(lab.out)):
            return run(config, Study(lab, common, launch, again))
    study = Study(lab, common, launch, again)
    return study.listed() if config.list else study.planned()


def run(config: Config, study: Study) -> dict[str, Any]:
    """Run what is left, write page and results."""
    lab, common = study.lab, study.common
    study.prepare()
    study.count()
    study.run_all()
    answer = study.answer()
    if not (common.quiet or common.json):
        printed(lab, answer)
        print(f"page: {study.out / PAGE}")
    results = results_of(lab, answer, study.record, config.file)
    if config.results:
        with writing(Path(config.results), "results"):
            Path(config.results).mkdir(parents=True, exist_ok=True)
            keep(Path(config.results) / f"{Path(config.file).stem}.json", results)
    return {**results, "out": str(study.out), "page": str(study.out / PAGE), "finished": True}


class Study:
    """A study under way: its ledger and the costs of its arms.

    record  {"runs": name -> note, …}; a note has arm, seed, rate, key, command, finished, seconds,
            cpu_seconds, value, rows, curve, flops
    costs   arm -> Cost; empty for scripts
    steps   arm -> steps of the runs, and of the runs that try rates
    """

    def __init__(self, lab: Lab, common: Common, launch: Launch, again: str):
        self.lab, self.common, self.launch, self.again = lab, common, launch, again
        self.out = Path(lab.out)
        self.costs: dict[str, Cost] = {}
        self.steps: dict[str, int | None] = {arm.name: None for arm in lab.arms}
        self.tuning_steps: dict[str, int | None] = dict(self.steps)
        self.record = opened(self.out)
        self._refuse_scripts_that_are_not_there()

    @property
    def notes(self) -> dict[str, dict[str, Any]]:
        return self.record["runs"]

    @property
    def prepared(self) -> bool:
        complete = all(Path(path).exists() for path in self.lab.makes)
        return complete and not self.record.get("preparing")

    def _refuse_scripts_that_are_not_there(self) -> None:
        for arm in self.lab.arms:
            words = self.lab.words(arm)
            if words[0] == "python" and not Path(words[1]).is_file():
                raise ConfigError(f"arm {arm.name!r}: there is no file {words[1]}", next="correct python")

    def prepare(self) -> None:
        """Run the commands that make the data, if it is not there."""
        if self.prepared:
            return
        self.record["preparing"] = True
        self.keep()
        for command in self.lab.prepare:
            told(self.common, f"prepare: {command}")
            code, result = self.launch(shlex.split(command), True)
            if code:
                raise ConfigError(
                    f"prepare failed (exit code {code}): {command}", next="its message is above"
                )
            if result.get(STOP):
                raise Stopped
        if gone := next((path for path in self.lab.makes if not Path(path).exists()), ""):
            raise ConfigError(f"prepare has run, but {gone} is not there", next="correct makes or prepare")
        del self.record["preparing"]
        self.keep()

    def count(self) -> None:
        """Count every arm's command, and set the steps. Refuses arms whose budgets differ."""
        lab = self.lab
        self.costs = {
            arm.name: cost_of(words, arm.name) for arm in lab.arms if (words := lab.words(arm))[0] != "python"
        }
        if len(self.costs) < len(lab.arms):
            return
        first = lab.arms[0].name
        if lab.equal == "active":
            refuse_unequal("active parameters", {name: cost.active for name, cost in self.costs.items()})
            tokens: dict[str, float | None] = {name: cost.tokens for name, cost in self.costs.items()}
            if any(tokens.values()):
                refuse_unequal("training tokens", tokens)
        if lab.equal != "flops":
            self.tuning_steps = dict.fromkeys(self.steps, lab.tuning_steps)
            return
        steps = self.costs[first].steps
        if steps is None:
            raise ConfigError(
                f"arm {first!r} has no steps, and equal = flops counts them", next="training.steps = 400"
            )
        self.steps |= equal_steps(self.costs, steps)
        self.tuning_steps |= equal_steps(self.costs, lab.tuning_steps or steps)

    def tuning(self) -> list[Run]:
        return tuning_runs(self.lab, self.tuning_steps)

    def main(self) -> list[Run]:
        return main_runs(self.lab, self.rates(), self.steps)

    def rates(self) -> dict[str, float]:
        """Chosen rate of each arm whose rates have all been tried."""
        chosen: dict[str, float] = {}
        sign = 1 if self.lab.better == "lower" else -1
        for arm in self.lab.arms if self.lab.learning_rates else ():
            tried = [
                note
                for note in self.notes.values()
                if note["arm"] == arm.name and note["tuning"] and note["finished"]
            ]
            values = {
                note["rate"]: note["value"] for note in tried if note["rate"] in self.lab.learning_rates
            }
            if len(values) == len(self.lab.learning_rates):
                finite = {rate: sign * value for rate, value in values.items() if value is not None}
                if not finite:
                    raise ConfigError(
                        f"arm {arm.name!r} diverged with every rate", next="lower learning_rates"
                    )
                chosen[arm.name] = min(finite, key=lambda rate: finite[rate])
        return chosen

    def run_all(self) -> None:
        """Run what is left. The page is written after every run."""
        phases = [self.tuning, self.main]
        self.refuse_changed(self.tuning() if self.lab.learning_rates else self.main())
        for phase in phases:
            runs = phase()
            self.refuse_changed(runs)
            for number, run in enumerate(runs, 1):
                if self.notes.get(run.name, {}).get("finished"):
                    continue
                kind = "try" if run.tuning else "run"
                told(
                    self.common, f"{kind} {number} of {len(runs)}: {run.name}{self._left(runs[number - 1 :])}"
                )
                try:
                    self.run_one(run)
                except KeyboardInterrupt:
                    message = f"in {run.name}; to continue, the same command: {self.again}"
                    raise KeyboardInterrupt(message) from None
                note = self.notes[run.name]
                value = "diverged" if note["value"] is None else f"{self.lab.value} {note['value']:.4g}"
                told(self.common, f"  {value} in {format_seconds(note['seconds'])}")
                write_lab(self.out / PAGE, page_of(self.lab, self.answer(), self.record))
        write_lab(self.out / PAGE, page_of(self.lab, self.answer(), self.record))

    def run_one(self, run: Run) -> None:
        """Run one, read what it left, note it."""
        folder = self.out / run.name
        begun = run.name in self.notes
        note = self.notes.setdefault(run.name, {"seconds": 0.0, "cpu_seconds": 0.0})
        note |= {"arm": run.arm.name, "seed": run.seed, "rate": run.rate, "tuning": run.tuning}
        note |= {"steps": run.steps, "key": run.key(), "finished": False, "command": run.command(folder)}
        self.keep()
        code = 0
        if not (
            begun and run.by_script and has_files(folder)
        ):  # else it was killed between its end and its note
            code = self._launched(run, folder, note)
        if code and not diverged(folder):
            raise ConfigError(
                f"{run.name} failed (exit code {code}); its message is above",
                next="mend it and give the same command again: finished runs stay",
            )
        note |= measured(folder, run, self.lab.value)
        cost = self.costs.get(run.arm.name)
        if cost and cost.per_token is not None:
            note |= {"flops": cost.per_token * note["tokens"], "active": cost.active, "total": cost.total}
        self.refuse_other_budgets()
        note["finished"] = True
        self.record |= {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} {cpu_class()}",
        }
        self.keep()
        shutil.rmtree(
            folder / "state", ignore_errors=True
        )  # moments: twice the model, for a run that is over

    def _launched(self, run: Run, folder: Path, note: dict[str, Any]) -> int:
        began, before = time.monotonic(), _cpu_of_children()
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            if run.by_script:
                code, result = by_script(run.words, folder, self.launch, True, "--out")
            else:
                code, result = self.launch([*run.words, "--out", str(folder)], True)
        finally:
            note["seconds"] += time.monotonic() - began
            note["cpu_seconds"] += _cpu_of_children() - before
            self.keep()
        if result.get("finished") is False or (result.get(STOP) and code):
            raise Stopped
        return code

    def refuse_other_budgets(self) -> None:
        """For scripts, which say what they have cost: refuse runs that differ in what is held equal."""
        if self.lab.equal == "none" or len(self.costs) == len(self.lab.arms):
            return
        field, words = ("flops", "FLOPs") if self.lab.equal == "flops" else ("active", "active parameters")
        values: dict[str, float | None] = {}
        for arm in self.lab.arms:
            ran = [
                n for n in self.notes.values() if n["arm"] == arm.name and not n["tuning"] and "value" in n
            ]
            if ran:
                counted = [note.get(field) for note in ran]
                first = next(iter(values.values()), counted[0])
                values[arm.name] = farthest(counted, first)
        if values:
            refuse_unequal(words, values)

    def refuse_changed(self, runs: Sequence[Run]) -> None:
        """Raise ConfigError that names the arm if a run that has begun was made by other words or files."""
        for run in runs:
            note = self.notes.get(run.name)
            if note and not has_files(self.out / run.name):
                del self.notes[run.name]  # nothing is there: it failed early, or was removed
            elif note and note["key"] != run.key():
                raise ConfigError(
                    f"arm {run.arm.name!r}: {run.name} was made by other words or files",
                    next=f"undo the change (see {self.out / RECORD}), remove {self.out / run.arm.name},"
                    " or --out ANOTHER",
                )

    def answer(self) -> Answer:
        return answer_of(self.lab, self.main(), self.notes, self.rates(), self.costs)

    def keep(self) -> None:
        keep(self.out / RECORD, self.record)

    # --- before and beside the runs

    def planned(self) -> dict[str, Any]:
        """Print every run, its FLOPs, and the minutes that are left."""
        if not self.prepared:
            commands = [
                each if each.startswith("python ") else f"unfreeze {each}" for each in self.lab.prepare
            ]
            raise ConfigError(
                "the data is not made yet, so FLOPs cannot be counted", next=" && ".join(commands)
            )
        self.count()
        self.refuse_changed(self.tuning())
        runs = [*self.tuning(), *self.main()]
        self.refuse_changed(runs)
        rows: list[dict[str, Any]] = []
        for run in runs:
            flops, done = self._flops(run), bool(self.notes.get(run.name, {}).get("finished"))
            command = run.command(self.out / run.name)
            if self.lab.learning_rates and not run.tuning and run.rate is None:
                command += " --learning-rate BEST"
            rows.append({"name": run.name, "done": done, "flops": flops, "command": command})
            if not self.common.json:
                words = format_flops(flops) if flops else "FLOPs unknown"
                print(f"{run.name:<32} {words}{', done' if done else ''}")
        for arm in self.lab.arms if not self.common.json else ():
            last = [row["command"] for row, run in zip(rows, runs, strict=True) if run.arm is arm][-1]
            print(f"\n{arm.name}\n  {last}")
        seconds = self._seconds(runs)
        if not self.common.json:
            left = sum(not row["done"] for row in rows)
            print(f"\n{left} of {len(rows)} runs are left, {_minutes(seconds)}")
        return {"runs": rows, "seconds": seconds, "finished": False}

    def listed(self) -> dict[str, Any]:
        """Print the ledger."""
        fields = ("arm", "seed", "rate", "steps", "tuning", "finished", "value", "seconds", "key", "command")
        rows = [{"name": name, **{f: note.get(f) for f in fields}} for name, note in self.notes.items()]
        for row in rows:  # the same command runs it again
            row["finished"] = bool(row["finished"]) and has_files(self.out / row["name"])
        for row in rows if not self.common.json else ():
            value = ABSENT if row["value"] is None else f"{row['value']:.4g}"
            state = "finished" if row["finished"] else "begun"
            time_taken = format_seconds(row["seconds"])
            print(f"{row['name']:<24} {state:<9} {value:>9} {time_taken:>12}  {row['command']}")
        return {"runs": rows, "ledger": str(self.out / RECORD)}

    def _flops(self, run: Run) -> float | None:
        """FLOPs of a run: counted, or those of a finished run of the same arm."""
        cost = self.costs.get(run.arm.name)
        steps = (run.steps or cost.steps) if cost else None
        if cost and cost.per_step is not None and steps:
            return cost.per_step * steps
        return next((n["flops"] for n in self._finished(run) if "flops" in n), None)

    def _finished(self, run: Run) -> list[dict[str, Any]]:
        """Finished runs of the same arm, those of the same kind first."""
        own = [n for n in self.notes.values() if n["finished"] and n["arm"] == run.arm.name]
        return sorted(own, key=lambda note: note["tuning"] != run.tuning)

    def _seconds(self, runs: Sequence[Run]) -> float | None:
        """Seconds of the runs that are left: by finished ones, else by FLOPs and a matrix product's rate."""
        total = 0.0
        for run in runs:
            if self.notes.get(run.name, {}).get("finished"):
                continue
            flops, ran = self._flops(run), self._finished(run)
            if ran:
                scale = flops / ran[0]["flops"] if flops and ran[0].get("flops") else 1.0
                start = min(START, ran[0]["seconds"])
                total += start + (ran[0]["seconds"] - start) * scale
            elif flops:
                total += START + flops / (SHARE * _matrix_rate())
            else:
                return None
        return total

    def _left(self, runs: Sequence[Run]) -> str:
        seconds = self._seconds(runs)
        return "" if seconds is None else f", {_minutes(seconds)} left for these"


def _minutes(seconds: float | None) -> str:
    return "time unknown before a run has finished" if seconds is None else f"about {seconds / 60:.1f} min"


_RATE: list[float] = []


def _matrix_rate() -> float:
    """FLOP/s of a product of the size that small models have, measured once, in float32."""
    if not _RATE:
        import torch

        a, b = torch.ones(2048, 256), torch.ones(256, 512)
        torch.mm(a, b)
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(a, b)
        _RATE.append(20 * 2 * 2048 * 256 * 512 / (time.perf_counter() - began))
    return _RATE[0]


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def farthest(counted: Sequence[float | None], first: float | None) -> float | None:
    """Return the number that differs most from `first`; None if one is not counted."""
    known = [number for number in counted if number is not None]
    if first is None or len(known) < len(counted):
        return None
    return max(known, key=lambda number: abs(number - first))


def _is_note(note: object) -> bool:
    """True if a run's note has what is read from it."""
    if not isinstance(note, dict):
        return False
    begun = {"arm", "tuning", "finished", "seconds", "cpu_seconds", "key", "command"}
    return not ((begun | {"value"} if note.get("finished") else begun) - note.keys())


def opened(out: Path) -> dict[str, Any]:
    """Read lab.json, or begin one. Raises ConfigError for a folder of something else."""
    if (out / RECORD).is_file():
        again = "give another folder as --out"
        record = read_object(out / RECORD, ConfigError, next=again)
        runs = record.get("runs")
        if not isinstance(runs, dict) or not all(map(_is_note, cast(dict[str, Any], runs).values())):
            raise ConfigError(f"{out / RECORD} is no ledger of a study", next=again)
        return record
    if has_files(out):
        raise ConfigError(f"{out} is not empty and has no {RECORD}", next="give another folder as --out")
    return {"runs": {}}
