"""The house keeps its rooms: imports go downward only, rooms of a layer don't know each other, nothing is
called utils (docs/why/design.md)."""

import ast
import functools
import importlib
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from unfreeze.models import FAMILIES

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "unfreeze"
LAYER = {
    "core": 0,
    "untrusted": 1,
    "config": 2,
    "quant": 2,
    "report": 3,
    "tracking": 4,
    "checkpoint": 3,
    "data": 3,
    "kernels": 3,
    "models": 4,
    "objectives": 4,
    "adapters": 5,
    "parallel": 5,
    "generate": 6,
    "train": 7,
    "evaluate": 7,
    "teach": 7,
    "rollout": 7,
    "serve": 7,
    "compress": 7,
    "job": 8,
    "synth": 8,
    "recipes": 9,
    "commands": 10,
    "drill": 10,
    "cli": 11,
    "api": 11,
}
FORBIDDEN = {"transformers", "peft", "trl", "accelerate", "compressed_tensors", "liger_kernel", "pickle"}
OUTSIDE = {"benchmarks", "tests", "examples"}  # of the repository, not of the package
EXEMPT = {
    # comparing with the oracle is what `unfreeze bisect` is for; imported inside one function
    ("commands/bisect.py", "transformers"),
    # an optional candidate, where a user has it installed; imported when it is loaded
    ("kernels/liger.py", "liger_kernel"),
    # the one door to the benchmarks of a clone; refused by it where there is none
    ("commands/bench.py", "benchmarks"),
}


@functools.cache  # two tests read all of the package
def imports(source: str) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in a file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
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
    for line, module in imports(source):
        parts = module.split(".")
        if parts[0] in FORBIDDEN and (where, parts[0]) not in EXEMPT:
            bad.append(
                f"{where}:{line} imports {module}: oracles belong to tests and benchmarks; compute it here,"
                " or move this to tests/"
            )
        if parts[0] in OUTSIDE and (where, parts[0]) not in EXEMPT:
            bad.append(
                f"{where}:{line} imports {module}: a wheel has none; move what the package needs into it"
            )
        if module.startswith("torch.distributed") and room != "parallel":
            bad.append(
                f"{where}:{line} imports {module}: only parallel/ talks to other processes; pass a"
                " parallel.collectives.Group in"
            )
        if parts[0] != "unfreeze" or len(parts) < 2 or parts[1] not in LAYER or parts[1] == room:
            continue
        if LAYER[parts[1]] >= LAYER[room]:
            bad.append(
                f"{where}:{line} room {room} (L{LAYER[room]}) imports {module} (L{LAYER[parts[1]]}): move the"
                " shared noun down to core, or pass the part in from recipes/"
            )
    return bad


# Objectives that help seldom (docs/howto/teacher_layers.md): the package reaches them through one file.
BEHIND = ("objectives.intermediate", "objectives.corrector", "kernels.attention.relations", "generate.joint")
BEHIND += ("models.widths",)
JOINT = "teach/inside.py"


def around_the_joint(source: str, where: str) -> list[str]:
    """Imports of what stands behind JOINT, in a file that is neither it nor one of them."""
    if where == JOINT or where.removesuffix(".py").replace("/", ".") in BEHIND:
        return []
    return [
        f"{where}:{line} imports {module}: import it from unfreeze.{JOINT.removesuffix('.py').replace('/', '.')}"
        for line, module in imports(source)
        if module.startswith(tuple(f"unfreeze.{name}" for name in BEHIND))
    ]


def test_what_helps_seldom_is_reached_through_one_file():
    files = {
        str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")
    }
    assert not [line for where, source in files.items() for line in around_the_joint(source, where)]
    assert {f"{name.replace('.', '/')}.py" for name in BEHIND} <= files.keys()


def test_a_way_around_the_joint_is_seen():
    source = "def late():\n    from unfreeze.objectives.corrector import corrector\n"
    assert around_the_joint(source, "train/step.py")[0].startswith(
        "train/step.py:2 imports unfreeze.objectives"
    )
    assert not around_the_joint(source, JOINT) and not around_the_joint(source, "generate/joint.py")


MOST_LINES, MOST_ARGUMENTS = 100, 10
# of Triton and Numba: pointers, strides and sizes are their arguments
COMPILED = {"jit", "Kernel", "serial", "inner", "Callee", "instruction", "instruction_of_kind"}
LONG = {
    "job/data.py:encode": "the trip of the rows in one place, with the three things that are said meanwhile",
    "data/store/dataset.py:encode_files": "what of a run's [data] decides the tokens, each by name",
    "data/store/streamed.py:streamed_files": "the same as encode_files, which it does ahead",
    "job/watch/samples.py:Samples.__init__": "who speaks, and where the prompts come from",
    "kernels/decode_step/tiles.py:tile.rows": "compiled: the rows of a weight, by addresses and strides",
    "kernels/expert_mlp/fused.py:_ExpertMLP.forward": "autograd: each tensor that may need a gradient",
    "models/blocks/compressed.py:CompressedAttention.__init__": "the matrices of the layer, as in MLA",
    "models/blocks/mla.py:MLA.__init__": "the matrices of the layer, by their names in checkpoints",
    "objectives/preference.py:preference": "the numbers of six published losses, by their published names",
    "parallel/placement/place.py:place": "a checkpoint, its rules, and each way in which weights may be kept",
    "train/step.py:train_step": "what forward_backward and optim_step take, together",
}
"""Functions of more than MOST_LINES lines or MOST_ARGUMENTS arguments, and why."""


def long_functions(source: str, where: str) -> list[str]:
    """ "where:name lines arguments" of functions beyond either limit; self and cls don't count."""
    found = []

    def look(node: ast.AST, names: tuple[str, ...]) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                asked = [*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs]
                asked += [each for each in (inner.args.vararg, inner.args.kwarg) if each]
                count = sum(each.arg not in ("self", "cls") for each in asked)
                lines = (inner.end_lineno or 0) - inner.lineno + 1
                wrapped = {
                    name for mark in inner.decorator_list for name in re.findall(r"\w+", ast.unparse(mark))
                }
                if lines > MOST_LINES or (count > MOST_ARGUMENTS and not wrapped & COMPILED):
                    found.append(f"{where}:{'.'.join((*names, inner.name))} {lines} lines {count} arguments")
            look(inner, (*names, inner.name) if hasattr(inner, "name") else names)

    look(ast.parse(source), ())
    return found


def test_functions_are_short_or_their_reason_is_here():
    files = {
        str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")
    }
    long = [line for where, source in files.items() for line in long_functions(source, where)]
    assert {line.split()[0] for line in long} == LONG.keys(), "\n".join(long)


def test_a_long_function_is_seen():
    lines = "\n".join(["def long():", *["    x = 1"] * MOST_LINES])
    wide = f"def wide(self, {', '.join(f'a{i}' for i in range(MOST_ARGUMENTS + 1))}): pass"
    inside = f"class C:\n    {wide}"
    assert long_functions(lines, "f.py") == ["f.py:long 101 lines 0 arguments"]
    assert long_functions(inside, "f.py") == ["f.py:C.wide 1 lines 11 arguments"]
    assert not long_functions(f"@triton.jit\n{wide}", "f.py") and not long_functions("def f(a): pass", "f.py")


def test_rooms_import_downward_only():
    bad = []
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room in LAYER:
            bad += violations(room, file.read_text(encoding="utf-8"), str(relative))
    assert not bad, "\n".join(bad)


def test_every_room_is_on_the_map():
    rooms = {
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name not in ("assets", "__pycache__")
    }
    unknown = rooms - LAYER.keys()
    assert not unknown, (
        f"rooms without a layer: {sorted(unknown)}; give each a layer in tests/test_layout.py and in docs/why/design.md"
    )


def on_the_map(page: str) -> dict[str, int]:
    """room -> layer, as the page of the design has them."""
    return {room: int(layer) for layer, room in re.findall(r"^ L(\d+) +(\w+)(?:/|\.py) ", page, flags=re.M)}


def test_the_room_tree_of_the_design_is_the_house():
    rooms = {
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name not in ("assets", "__pycache__")
    }
    page = (PACKAGE.parents[1] / "docs" / "why" / "design.md").read_text(encoding="utf-8")
    assert on_the_map(page) == {room: LAYER[room] for room in rooms | {"cli", "api"}}, (
        "the tree of docs/why/design.md and LAYER differ"
    )


def test_a_room_missing_from_the_tree_is_seen():
    assert on_the_map(" L0  core/        nouns\n L11 cli.py       parse\n L2 without a slash") == {
        "core": 0,
        "cli": 11,
    }


REPOSITORY = PACKAGE.parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").rglob("*.md")),
)
TO_BE_MADE = {"docs/measured/nightly.md"}  # by `make nightly`


def lost(page: str, text: str) -> list[str]:
    """Links and paths of a page that lead nowhere. A path is written in ` ` from the root, src/unfreeze or tests."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    bad = [link for link in links if not (REPOSITORY / page).parent.joinpath(link).exists()]
    paths = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|toml|ipynb))`", text) if page in PAGES[:2] else []
    roots = (REPOSITORY, PACKAGE, REPOSITORY / "tests")
    bad += [path for path in paths if not any((root / path).exists() for root in roots)]
    return [f"{page}: {path} is not there" for path in bad if path not in TO_BE_MADE]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_file_that_is_not_there(page):
    assert not (bad := lost(page, (REPOSITORY / page).read_text(encoding="utf-8"))), "\n".join(bad)


def test_control_arm_a_lost_link_and_a_lost_path_are_seen():
    text = "[a](docs/gone.md) [b](docs/index.md#x) `train/fit.py` `train/gone.py` `objectives/<loss>.py`"
    assert lost("README.md", text) == [
        "README.md: docs/gone.md is not there",
        "README.md: train/gone.py is not there",
    ]


def test_nothing_is_called_utils():
    bad = [
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*")
        if p.stem in ("utils", "util", "helpers", "misc", "common")
    ]
    assert not bad, f"{bad}: put a helper beside its one caller, or make it a noun in core"


# What only one quantized format has. "nibble" is English for 4 bits; a scale, a group or a bias all have.
INT4_ONLY = re.compile(r"weight_packed|weight_scale|weight_shape|nibble", re.IGNORECASE)


def knows_int4(sources: dict[str, str]) -> list[str]:
    """path:line of each word of INT4's outside quant/ and the files and folders of kernels/ named after it."""
    return [
        f"{path}:{number}"
        for path, source in sources.items()
        if not (
            path.startswith("quant/")
            or re.match(r"kernels/(expand/|decode_step/(formats|codes)|(.*/)?int4_)", path)
        )
        for number, line in enumerate(source.splitlines(), 1)
        if INT4_ONLY.search(line)
    ]


def test_a_format_is_known_in_quant_and_in_the_ops_named_after_it():
    files = PACKAGE.rglob("*.py")
    sources = {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in files}
    found = knows_int4(sources)
    assert not found, f"{found}: ask the codec, or quant/formats.py (is_part, is_packed), instead"
    assert any(INT4_ONLY.search(source) for source in sources.values())


def test_a_leaked_format_is_seen():
    leak = "x = 1\nif name.endswith('weight_packed'): pass"
    assert knows_int4({"job/trained.py": leak}) == ["job/trained.py:2"]
    assert knows_int4({"kernels/choice/op.py": "# a Nibble"}) == ["kernels/choice/op.py:1"]
    allowed = ("quant/int4.py", "kernels/expand/__init__.py", "kernels/loops/int4_panels.py")
    assert knows_int4(dict.fromkeys(allowed, leak)) == []


ROOT = {
    ".ci",
    ".dockerignore",
    ".gitattributes",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "conftest.py",
    "constraints.txt",
    "docker",
    "docs",
    "examples",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
    "src",
    "tests",
}


def strays(tracked: list[str]) -> set[str]:
    """What lies at the root of the repository and has no business there."""
    return {path.split("/")[0] for path in tracked} - ROOT


def test_nothing_stray_lies_at_the_root():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = strays(listed.stdout.splitlines())
    assert not found, f"{sorted(found)}: remove it, put it into a folder, or name it in ROOT above"


def test_a_stray_file_is_seen():
    assert strays(["pid", "README.md", "src/unfreeze/cli.py"]) == {"pid"}


TESTS = Path(__file__).parent
LONGEST = 500  # lines of a source file; a longer one has a seam somewhere


def too_long(sources: dict[str, int]) -> list[str]:
    """Source files (path -> lines) beyond LONGEST."""
    return [
        f"{file} has {lines} lines, at most {LONGEST}: cut it at a natural seam, or delete"
        for file, lines in sources.items()
        if lines > LONGEST
    ]


LONGEST_FAMILY = 120  # lines of models/<family>.py, so that a reader has a family on two screens


def long_families(sources: dict[str, int]) -> list[str]:
    """Files of model families (path -> lines) beyond LONGEST_FAMILY."""
    return [
        f"{file} has {lines} lines, at most {LONGEST_FAMILY}: move FIELDS and shape, all that reads config.json,"
        f" to models/configs/{Path(file).name}"
        for file, lines in sources.items()
        if lines > LONGEST_FAMILY
    ]


def test_a_familys_file_is_short():
    files = {Path(str(family.__file__)) for family in FAMILIES.values()}
    assert {file.parent for file in files} == {PACKAGE / "models"}
    lines = {f"models/{file.name}": len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert not (bad := long_families(lines)), "\n".join(bad)


def read_elsewhere(family: object, part: object) -> list[str]:
    """FIELDS or shape of a family whose file in models/configs/ has another."""
    return [name for name in ("FIELDS", "shape") if getattr(family, name) is not getattr(part, name)]


def test_a_familys_config_json_is_read_in_one_file():
    apart = {file.stem for file in (PACKAGE / "models" / "configs").glob("[!_]*.py")}
    parts = {name: importlib.import_module(f"unfreeze.models.configs.{name}") for name in apart}
    bad = {name: both for name, part in parts.items() if (both := read_elsewhere(FAMILIES[name], part))}
    assert not bad, f"models/<family>.py must take them from models/configs/<family>.py: {bad}"


def test_a_second_table_of_a_family_is_seen():
    part = SimpleNamespace(FIELDS=object(), shape=object())
    assert read_elsewhere(SimpleNamespace(FIELDS=object(), shape=part.shape), part) == ["FIELDS"]
    assert read_elsewhere(part, part) == []


def test_a_long_family_is_seen():
    assert long_families({"models/a.py": 120}) == []
    assert long_families({"models/a.py": 121}) == [
        "models/a.py has 121 lines, at most 120: move FIELDS and shape, all that reads config.json, to"
        " models/configs/a.py"
    ]


def untested(sources: list[str], tests: list[str]) -> list[str]:
    """Folders of source files that no folder of tests stands beside.

    A folder is covered by its own tests, or by those of the folder that it lies in.
    """
    tested = {test.rpartition("/")[0] for test in tests}
    folders = {file.rpartition("/")[0] for file in sources if not file.endswith("__init__.py")}
    return [
        f"{folder}/ has no tests: write one in tests/{folder}/"
        for folder in sorted(folders)
        if folder not in tested and folder.rpartition("/")[0] not in tested - {""}
    ]


def test_every_folder_has_tests_and_no_file_is_too_long():
    sources = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    tests = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    bad = untested(list(sources), tests) + too_long(sources)
    assert not bad, "\n".join(bad)


def test_a_file_that_has_grown_too_long_is_seen():
    assert too_long({"a.py": LONGEST}) == [] and "a.py has 501" in too_long({"a.py": LONGEST + 1})[0]


def test_a_folder_without_tests_is_seen():
    sources, tests = ["a/one.py", "a/b/two.py", "cli.py"], ["a/test_one.py", "test_cli.py"]
    assert untested(sources, tests) == []
    assert untested(["c/three.py", *sources], tests) == ["c/ has no tests: write one in tests/c/"]
    assert untested(["c/__init__.py"], tests) == []


@pytest.mark.parametrize(
    "room, source, expected",
    [
        ("core", "from unfreeze.train.fit import fit", "room core (L0) imports unfreeze.train.fit"),
        (
            "kernels",
            "def f():\n    from unfreeze.data import packing",
            "room kernels (L3) imports unfreeze.data",
        ),
        ("models", "import transformers", "oracles belong to tests"),
        ("train", "import torch.distributed as dist", "only parallel/ talks to other processes"),
        ("generate", "from unfreeze import recipes", "room generate (L6) imports unfreeze.recipes"),
    ],
)
def test_the_check_sees_a_planted_violation(room, source, expected):
    assert any(expected in line for line in violations(room, source, "x.py"))


def test_an_exemption_is_for_one_file_and_one_library():
    assert violations("recipes", "import transformers", "commands/bisect.py") == []
    assert violations("kernels", "import liger_kernel", "kernels/liger.py") == []
    assert violations("kernels", "import liger_kernel", "kernels/rms_norm/__init__.py") and violations(
        "kernels", "import peft", "kernels/liger.py"
    )
    assert violations("recipes", "import peft", "commands/bisect.py") and violations(
        "recipes", "import transformers", "commands/doctor.py"
    )
    assert violations("commands", "import benchmarks", "commands/bench.py") == []
    assert violations("commands", "import benchmarks", "commands/demo.py") and violations(
        "commands", "from tests import tiny", "commands/bench.py"
    )


def test_every_file_that_is_no_code_is_in_the_package() -> None:
    """An editable install finds them all; `pip install .` copies what package-data names."""
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = table["tool"]["setuptools"]["package-data"]["unfreeze"]
    named = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".py"]
    left_out = [
        str(path.relative_to(REPOSITORY))
        for path in data
        if path.parent.name != "__pycache__" and path not in named
    ]
    assert not left_out, f"add them to package-data in pyproject.toml: {left_out}"
