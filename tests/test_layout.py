"""The house keeps its rooms: imports go downward only, rooms of a layer don't know each other, nothing is
called utils (README.md, the house)."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "unfreeze"
LAYER = {
    "core": 0,
    "untrusted": 1,
    "config": 2,
    "quant": 2,
    "report": 2,
    "tracking": 3,
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
    "compress": 7,
    "job": 8,
    "recipes": 9,
    "serve": 9,
    "commands": 10,
    "bench": 10,
    "drill": 10,
    "cli": 11,
    "api": 11,
}
FORBIDDEN = {"transformers", "peft", "trl", "accelerate", "compressed_tensors", "liger_kernel", "pickle"}
EXEMPT = {
    # comparing with the oracle is what `unfreeze bisect` is for; imported inside one function
    ("commands/bisect.py", "transformers"),
    # an optional candidate, where a user has it installed; imported when it is loaded
    ("kernels/liger.py", "liger_kernel"),
    # the sides that `unfreeze bench` compares with; imported by name inside one function (peers.library), in
    # worker processes
    ("bench/peers.py", "transformers"),
    ("bench/peers.py", "peft"),
    ("bench/peers.py", "liger_kernel"),
}


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
        if parts[0] in FORBIDDEN and (where, parts[0]) not in EXEMPT:
            bad.append(
                f"{where}:{line} imports {module}: oracles belong to tests and benchmarks; compute it here,"
                " or move this to tests/"
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
        f"rooms without a layer: {sorted(unknown)}; give each a layer in tests/test_layout.py and in README's"
        " room tree"
    )


def on_the_map(readme: str) -> dict[str, int]:
    """room -> layer, as README's room tree has them."""
    return {room: int(layer) for layer, room in re.findall(r"^ L(\d+) +(\w+)(?:/|\.py) ", readme, flags=re.M)}


def test_the_readmes_room_tree_is_the_house():
    rooms = {
        path.name
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name not in ("assets", "__pycache__")
    }
    readme = (PACKAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert on_the_map(readme) == {room: LAYER[room] for room in rooms | {"cli", "api"}}, (
        "README's room tree and LAYER differ"
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
    *(f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")),
)
TO_BE_MADE = {"docs/nightly.md"}  # by `make nightly`


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
    text = "[a](docs/gone.md) [b](docs/using.md#x) `train/fit.py` `train/gone.py` `objectives/<loss>.py`"
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
        if not (path.startswith("quant/") or re.match(r"kernels/(expand/|(.*/)?int4_)", path))
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
LONG = 80  # lines; a shorter file is a part of its caller, tested through it
LONGEST = 500  # lines of a source file; a longer one has a seam somewhere
# source file -> the test file that covers it, where that doesn't bear its name
TESTED_BY = {
    "models/wrappers.py": "models/test_shape.py",
    "checkpoint/shard.py": "compress/test_merge.py",
    "commands/merge_losses.py": "commands/test_merge.py",
    "commands/merge_rows.py": "commands/test_merge.py",
    "compress/deltas.py": "compress/test_merge.py",
    "compress/released.py": "compress/test_merge.py",
    "compress/rounding.py": "compress/test_merge.py",
    "compress/work.py": "compress/test_merge.py",
    "quant/compressed.py": "quant/test_scheme.py",
    "config/sft.py": "recipes/test_continue.py",
    "config/distill.py": "recipes/test_distill.py",
    "data/rows/scan.py": "job/test_streaming.py",
    "parallel/plan/aside.py": "teach/test_teacher.py",
    "teach/answers.py": "commands/test_answers.py",
    "teach/chat.py": "commands/test_answers.py",
    "teach/coding.py": "teach/test_store.py",
    "recipes/prepare.py": "teach/test_store.py",
    "config/prefer.py": "recipes/test_prefer.py",
    "teach/reference.py": "recipes/test_prefer.py",
    "job/signs.py": "recipes/test_prefer.py",
    "job/second.py": "teach/test_kept.py",
    "models/blocks/attention.py": "models/test_families.py",
    "bench/checkpoints.py": "bench/test_load.py",
    "commands/planned.py": "commands/test_plan.py",
    "commands/opened.py": "commands/test_plan.py",
    "parallel/dispatch.py": "parallel/test_expert_parallel.py",
    "parallel/plan/counts.py": "parallel/plan/test_choose.py",
    "parallel/plan/layout.py": "parallel/plan/test_choose.py",
    "parallel/plan/words.py": "parallel/test_plan.py",
    "parallel/simulate.py": "parallel/plan/test_seconds.py",
    "adapters/files.py": "adapters/test_shards.py",
    "adapters/decode.py": "adapters/test_read.py",
    "config/training.py": "recipes/test_sft.py",
    "core/batch.py": "core/test_core.py",
    "core/events.py": "core/test_core.py",
    "data/__init__.py": "data/test_dataset.py",
    "data/account.py": "data/test_dataset.py",
    "data/encoding.py": "data/test_workers.py",
    "data/rows/row.py": "data/packing/test_split.py",
    "data/stores.py": "data/test_examples.py",
    "job/places.py": "job/test_split.py",
    "job/proposal.py": "commands/test_init.py",
    "data/rows/fields.py": "data/rows/test_files.py",
    "data/rows/messages.py": "data/rows/test_files.py",
    "data/rows/shapes.py": "data/rows/test_files.py",
    "data/tokens/completions.py": "data/tokens/test_taught.py",
    "data/tokens/think.py": "data/tokens/test_taught.py",
    "data/tokens/forms.py": "data/tokens/test_taught.py",
    "data/tokens/turns.py": "data/tokens/test_taught.py",
    "data/tokens/tokenizer_json.py": "data/tokens/test_tokenizer.py",
    "generate/open.py": "generate/test_model.py",
    "generate/source.py": "generate/test_model.py",
    "models/recompute.py": "models/test_decoder.py",
    "models/targets.py": "adapters/test_attach.py",
    "models/__init__.py": "models/test_families.py",
    "models/blocks/bytes.py": "parallel/test_peak_on_meta.py",
    "kernels/loops/panels.py": "kernels/loops/test_float_panels.py",
    "models/blocks/experts.py": "parallel/test_plan.py",
    "models/blocks/linear.py": "adapters/test_lora.py",
    "models/blocks/moe.py": "models/test_families.py",
    "models/blocks/routers.py": "models/test_families.py",
    "models/deepseek_v3.py": "models/test_families.py",
    "models/factory.py": "models/test_families.py",
    "models/gemma2.py": "models/test_families.py",
    "models/gemma4_text.py": "models/test_families.py",
    "models/layer.py": "models/test_families.py",
    "models/layer_types.py": "models/test_families.py",
    "models/llama.py": "models/test_families.py",
    "models/deepseek_v2.py": "models/test_family_files.py",
    "models/ernie4_5_moe.py": "models/test_family_files.py",
    "models/gpt_oss.py": "models/test_family_files.py",
    "models/llama4_text.py": "models/test_family_files.py",
    "models/mistral4.py": "models/test_family_files.py",
    "models/minimax_m2.py": "models/test_family_files.py",
    "models/phi3.py": "models/test_families.py",
    "models/qwen3_moe.py": "models/test_families.py",
    "models/smollm3.py": "models/test_families.py",
    "parallel/plan/__init__.py": "parallel/test_plan.py",
    "parallel/plan/propose.py": "parallel/test_plan.py",
    "parallel/plan/sizes.py": "parallel/test_plan.py",
    "parallel/plan/terms.py": "parallel/test_plan.py",
    "quant/codec.py": "quant/test_int4.py",
    "bench/job.py": "bench/test_moe.py",
    "bench/kimi_slice.py": "bench/test_layer.py",
    "bench/peers.py": "bench/test_moe.py",
    "bench/plan_page.py": "bench/test_plan.py",
    "bench/targets.py": "bench/test_report.py",
    "bench/training.py": "bench/test_moe.py",
    "drill/__init__.py": "drill/test_drill.py",
    "drill/experts.py": "drill/test_drill.py",
    "drill/fault.py": "drill/test_drill.py",
    "drill/loading.py": "drill/test_drill.py",
    "drill/numbers.py": "drill/test_drill.py",
    "drill/processes.py": "drill/test_drill.py",
    "drill/runs.py": "drill/test_drill.py",
    "drill/sandbox.py": "drill/test_drill.py",
    "job/checks.py": "commands/test_doctor.py",
    "job/data.py": "recipes/test_sft.py",
    "job/divided.py": "parallel/test_fsdp.py",
    "job/folder.py": "recipes/test_sft.py",
    "job/job.py": "recipes/test_sft.py",
    "job/loading.py": "recipes/test_sft.py",
    "job/loop.py": "test_api.py",
    "job/plan.py": "commands/test_doctor.py",
    "job/samples.py": "recipes/test_sft.py",
    "train/together.py": "train/test_shards.py",
    "report/page.py": "report/test_html.py",
    "report/events.py": "report/test_report_events.py",
    "report/run.py": "report/test_report_run.py",
    "tracking/__init__.py": "tracking/test_sinks.py",
}


def op_folder(file: str) -> str | None:
    """kernels/swiglu/ for a file of that op, whose implementations all its tests go through. None elsewhere:
    what lies in kernels/choice and kernels/loops is no op."""
    found = re.match(r"kernels/(?!choice/|loops/)\w+/", file)
    return None if found is None else found[0]


def mirror(file: str) -> str:
    """train/fit.py -> train/test_fit.py"""
    folder, _, name = file.rpartition("/")
    return f"{folder}/test_{name}".removeprefix("/")


def too_long(sources: dict[str, int]) -> list[str]:
    """Source files (path -> lines) beyond LONGEST."""
    return [
        f"{file} has {lines} lines, at most {LONGEST}: cut it at a natural seam, or delete"
        for file, lines in sources.items()
        if lines > LONGEST
    ]


def untested(sources: dict[str, int], tests: set[str], named: dict[str, str]) -> list[str]:
    """What is wrong between source files (path -> lines) and test files, each with how to mend it."""
    long = {file for file, lines in sources.items() if lines > LONG}
    ops = {op_folder(file) for file in long}
    bad = [
        f"{op} has no test: write one in tests/{op}"
        for op in sorted(filter(None, ops))
        if not any(test.startswith(op) for test in tests)
    ]
    bad += [
        f"{file} ({sources[file]} lines) has no {mirror(file)}: write it, or name the test that covers it in"
        " TESTED_BY"
        for file in sorted(long)
        if mirror(file) not in tests and file not in named and op_folder(file) is None
    ]
    bad += [
        f"TESTED_BY: {file} is covered by the tests of its op; remove the entry"
        for file in sorted(named)
        if op_folder(file) is not None
    ]
    bad += [
        f"TESTED_BY: {file} is gone or short now; remove the entry" for file in sorted(named.keys() - long)
    ]
    bad += [
        f"TESTED_BY: {file} has a {mirror(file)} now; remove the entry"
        for file in sorted(named)
        if mirror(file) in tests
    ]
    return bad + [
        f"TESTED_BY: {test}, named for {file}, is not there"
        for file, test in sorted(named.items())
        if test not in tests
    ]


def test_every_long_source_file_has_a_test_and_none_is_too_long():
    sources = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    tests = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    bad = untested(sources, tests, TESTED_BY) + too_long(sources)
    assert not bad, "\n".join(bad)


def test_a_file_that_has_grown_too_long_is_seen():
    assert too_long({"a.py": LONGEST}) == [] and "a.py has 501" in too_long({"a.py": LONGEST + 1})[0]


def test_the_mirror_sees_a_planted_gap():
    sources, tests = {"a/long.py": LONG + 1, "a/short.py": LONG}, {"a/test_other.py"}
    assert untested(sources, tests | {"a/test_long.py"}, {}) == []
    assert untested(sources, tests, {"a/long.py": "a/test_other.py"}) == []
    assert "a/long.py (81 lines) has no a/test_long.py" in untested(sources, tests, {})[0]
    assert "is not there" in untested(sources, tests, {"a/long.py": "a/test_gone.py"})[0]
    assert (
        "gone or short" in untested(sources, tests | {"a/test_long.py"}, {"a/short.py": "a/test_other.py"})[0]
    )
    assert (
        "remove the entry"
        in untested(sources, tests | {"a/test_long.py"}, {"a/long.py": "a/test_other.py"})[0]
    )


def test_an_op_is_covered_by_the_tests_of_its_folder():
    sources = {"kernels/norm/triton_cuda.py": LONG + 1}
    assert untested(sources, {"kernels/norm/test_norm.py"}, {}) == []
    assert untested(sources, {"kernels/other/test_norm.py"}, {}) == [
        "kernels/norm/ has no test: write one in tests/kernels/norm/"
    ]
    row = {"kernels/norm/triton_cuda.py": "kernels/norm/test_norm.py"}
    assert "remove the entry" in untested(sources, {"kernels/norm/test_norm.py"}, row)[0]
    # a workshop is no op: each of its files has a test of its own
    assert "has no kernels/loops/test_rows.py" in untested({"kernels/loops/rows.py": LONG + 1}, set(), {})[0]


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
    assert violations("recipes", "import peft", "bench/peers.py") == [] and violations(
        "recipes", "import trl", "bench/peers.py"
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
