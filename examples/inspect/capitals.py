"""A task for Inspect (inspect_ai) that asks a model behind `unfreeze serve`. See README.md beside it."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}


@task
def capitals() -> Task:
    """Right if the answer names the capital."""
    samples = [
        Sample(input=f"What is the capital of {country}?", target=capital)
        for country, capital in CAPITALS.items()
    ]
    return Task(dataset=samples, solver=generate(max_tokens=32, temperature=0.0), scorer=includes())
