"""The house keeps its rooms: imports go downward only, rooms of a layer don't know each other, nothing is called utils (docs: DESIGN, the house)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "unfreeze"
LAYER = {
    "core": 0,
    "quant": 1, "report": 1,
    "checkpoint": 2, "kernels": 2, "data": 2,
    "models": 3, "objectives": 3,
    "adapters": 4, "parallel": 4,
    "generate": 5,
    "train": 6, "evaluate": 6, "serve": 6,
    "recipes": 7,
    "cli": 8,
}  # fmt: skip
FORBIDDEN = {"transformers", "peft", "trl", "accelerate", "compressed_tensors", "pickle"}


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in a file, those inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
            if node.module == "unfreeze":
                found += [(node.lineno, f"unfreeze.{alias.name}") for alias in node.names]
    return found


def violations(room: str, source: str, where: str) -> list[str]:
    """What breaks the house's rules in one file, each with how to mend it."""
    bad = []
    for line, module in imports(ast.parse(source)):
        parts = module.split(".")
        if parts[0] in FORBIDDEN:
            bad.append(f"{where}:{line} imports {module}: oracles belong to tests and benchmarks; compute it here, or move this to tests/")
        if parts[0] != "unfreeze" or len(parts) < 2 or parts[1] not in LAYER or parts[1] == room:
            continue
        if LAYER[parts[1]] >= LAYER[room]:
            bad.append(
                f"{where}:{line} room {room} (L{LAYER[room]}) imports {module} (L{LAYER[parts[1]]}): move the shared noun down to core, "
                f"or pass the part in from recipes/"
            )
    return bad


def test_rooms_import_downward_only():
    bad = []
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room in LAYER:
            bad += violations(room, file.read_text(encoding="utf-8"), str(relative))
    assert not bad, "\n".join(bad)


def test_every_room_is_on_the_map():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("assets", "__pycache__")}
    unknown = rooms - LAYER.keys()
    assert not unknown, f"rooms without a layer: {sorted(unknown)}; give each a layer in tests/test_layout.py and in README's room tree"


def test_nothing_is_called_utils():
    bad = [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*") if p.stem in ("utils", "util", "helpers", "misc", "common")]
    assert not bad, f"{bad}: put a helper beside its one caller, or make it a noun in core"


def test_every_source_file_has_a_test_room():
    tests = Path(__file__).parent
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(f.name != "__init__.py" for f in p.glob("*.py"))} - {"assets"}
    missing = [room for room in rooms if not list((tests / room).glob("test_*.py"))]
    assert not missing, f"rooms without tests: {missing}"


@pytest.mark.parametrize(
    "room, source, expected",
    [
        ("core", "from unfreeze.train.fit import fit", "room core (L0) imports unfreeze.train.fit"),
        ("kernels", "def f():\n    from unfreeze.data import packing", "room kernels (L2) imports unfreeze.data"),
        ("models", "import transformers", "oracles belong to tests"),
        ("generate", "from unfreeze import recipes", "room generate (L5) imports unfreeze.recipes"),
    ],
)
def test_the_check_sees_a_planted_violation(room, source, expected):
    assert any(expected in line for line in violations(room, source, "x.py"))
