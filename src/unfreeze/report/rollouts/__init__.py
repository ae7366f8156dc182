"""A run's rollouts: the files of its answers, their numbers, and the page to read them.

answers.py     a line of RUN/rollouts/step-000012.jsonl.gz, and how a file is read
writer.py      Rollouts(run).write(step, answers)
numbers.py     the numbers of a step, from its answers
behaviours.py  verification, backtracking, subgoals, backward chaining: counts by patterns
canaries.py    correlation of the reward with length and with form
watched.py     their warnings while a run goes on
copies.py      rollouts/step-000012.js, from which the page reads a step
trends.py      numbers of all steps as pictures and words
page.py        rollouts.html, and the section of report.html
"""

from unfreeze.report.rollouts.answers import Answer, StepFile, files
from unfreeze.report.rollouts.writer import Rollouts

__all__ = ["Answer", "Rollouts", "StepFile", "files"]
