"""The docstrings of the package, its benchmarks and examples, read from their source: none begins with a word that
makes a sentence a riddle, and names say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

from unfreeze import cli

PACKAGE = Path(cli.__file__).parent
ROOT = PACKAGE.parents[1]
FIRST = {"what", "whether", "where", "which", "of", "why", "those", "that", "so", "how"}
"""A predicate is "True if …", a function "Return …" or a noun: never a subordinate clause."""
EMPTY = {"found", "said", "told", "given", "asked", "made"}
"""Names of locals and parameters that hold anything."""


def faults(source: str) -> Iterator[str]:
    """line: the fault."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip('("').lower() in FIRST:
                yield f"{getattr(node, 'lineno', 1)}: a docstring begins with {words[0]!r}: {' '.join(words[:9])}"
        name = node.arg if isinstance(node, ast.arg) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in EMPTY:
            yield f"{node.lineno}: {name!r} does not say what it holds"


def test_docstrings_and_names_say_it_plainly():
    bad = [
        f"{path.relative_to(ROOT)}:{fault}"
        for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "examples")
        for path in sorted(folder.rglob("*.py"))
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "say it as an engineer of this field would:\n" + "\n".join(bad)


def test_control_arm_each_fault_is_seen():
    planted = 'def f(told):\n    "Whether it fits."\n    found = told\n    kept = found\n'
    assert [fault.split(":")[0] for fault in faults(planted)] == ["1", "1", "3"]
    assert list(faults('def fits(plan):\n    """True if the plan fits. What it takes: bytes."""\n')) == []
