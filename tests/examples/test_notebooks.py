"""The notebooks of examples/, executed whole, and what they leave behind; committed without outputs."""

import ast
import importlib
import inspect
import zipfile
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from peft import PeftConfig

import unfreeze
from unfreeze.config.names import spellings
from unfreeze.config.sft import Config
from unfreeze.drill.sandbox import TINY_K2

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def execute(notebook, folder):
    """Run every cell in a fresh kernel in `folder`, with tiny-k2 as the model. -> cell id -> what it showed.

    Cells tagged "install" find a wheel, which pip reads and does not install: the package is installed.
    """
    wheel(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DRY_RUN", "NO_INDEX", "NO_DEPS", "DISABLE_PIP_VERSION_CHECK"):
            patch.setenv(f"PIP_{name}", "1")
        patch.setenv("UNFREEZE_MODEL", str(TINY_K2))
        patch.setenv("OMP_NUM_THREADS", "1")
        # the kernel of this environment, and nothing of a user's
        for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(folder / "jupyter"))
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return {cell.id: "".join(map(shown, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


def wheel(folder):
    """A wheel as a user uploads it, of a version that is not installed."""
    about = "Metadata-Version: 2.1\nName: unfreeze\nVersion: 9.9\n"
    with zipfile.ZipFile(folder / "unfreeze-9.9-py3-none-any.whl", "w") as file:
        file.writestr("unfreeze-9.9.dist-info/METADATA", about)
        file.writestr(
            "unfreeze-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("unfreeze-9.9.dist-info/RECORD", "")


def shown(output):
    if output.output_type == "stream":
        return output.text
    return output.data.get("text/html", output.data["text/plain"])


def unknown(notebook):
    """What its code names of unfreeze and there is not: functions, and fields of a run."""
    found = []
    for node in (
        node
        for cell in notebook.cells
        if cell.cell_type == "code" and "install" not in cell.metadata.get("tags", [])
        for node in ast.walk(ast.parse(cell.source))
    ):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("unfreeze"):
            module = importlib.import_module(str(node.module))
            found += [name.name for name in node.names if not hasattr(module, name.name)]
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "unfreeze"
        ):
            found += [] if hasattr(unfreeze, node.attr) else [node.attr]
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("unfreeze."):
            takes = inspect.signature(
                getattr(unfreeze, ast.unparse(node.func).partition(".")[2], len)
            ).parameters
            known = {*takes, *spellings(Config)} if "fields" in takes else {*takes}
            known |= {name.partition(".")[0] for name in known}
            found += sorted({keyword.arg for keyword in node.keywords if keyword.arg} - known)
    return found


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first run")
    return folder, execute(nbformat.read(EXAMPLES / "first_run.ipynb", 4), folder)


@pytest.fixture(scope="module")
def free_gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("free gpu")
    return folder, execute(nbformat.read(EXAMPLES / "qwen3_free_gpu.ipynb", 4), folder)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert max(len(line) for cell in notebook.cells for line in cell.source.splitlines()) <= 110


def test_every_notebook_is_executed_here():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "qwen3_free_gpu"]


def test_the_first_run_learns_and_shows_it(first_run):
    folder, said = first_run
    (run,) = map(unfreeze.FinishedRun, folder.glob("runs/*/yoda"))
    assert run.finished and len(run.losses) == 30 and run.loss < run.losses[0] / 4
    assert said["loss"] == f"({run.losses[0]}, {run.loss})"
    assert "step 30/30" in said["train"] and "experts" in said["receipt"]
    assert "Hmm." not in said["before"] and "Hmm." in said["after"] and "Hmm." in said["load"]
    assert "<iframe srcdoc=" in said["report"] and "Figure" in said["curve"]


def test_its_own_loop_is_the_same_run_up_to_where_it_was_left(first_run):
    folder, said = first_run
    own, run = (unfreeze.FinishedRun(next(folder.glob(f"runs/*/{name}"))) for name in ("own-loop", "yoda"))
    assert len(own.losses) == 5 and own.losses == run.losses[:5] and "step-000005" in said["own-saved"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_what_there_is(path):
    notebook = nbformat.read(path, 4)
    assert unknown(notebook) == []
    (cell, *_) = [cell for cell in notebook.cells if "unfreeze.sft(" in cell.source]
    for old, new, named in (  # control arm
        ("unfreeze.sft(", "unfreeze.soft(", "soft"),
        ("model=", "modell=", "modell"),
        ("steps=", "tsteps=", "tsteps"),
    ):
        planted = deepcopy(notebook)
        planted.cells[notebook.cells.index(cell)].source = cell.source.replace(old, new)
        assert named in unknown(planted)


@pytest.mark.nightly  # 18 s; its cells are those of the first run, and what they name is looked at above
def test_the_gpu_notebook_leaves_an_adapter_that_peft_reads(free_gpu):
    folder, said = free_gpu
    (run,) = map(unfreeze.FinishedRun, folder.glob("runs/*"))
    assert run.finished and run.loss < run.losses[0]
    assert "Would install unfreeze-9.9" in said["install"] and "no GPU" in said["doctor"]
    assert "before: What is a lake?" in said["look"] and "after: What is a lake?" in said["look"]
    assert "Verified(" in said["export"] and "adapter.zip" in said["zip"]
    with zipfile.ZipFile(folder / "adapter.zip") as file:
        file.extractall(folder / "taken")
    assert PeftConfig.from_pretrained(folder / "taken").base_model_name_or_path == str(TINY_K2)


@pytest.mark.parametrize("notebook", ["first_run", pytest.param("free_gpu", marks=pytest.mark.nightly)])
def test_nothing_complains(notebook, request):
    _, said = request.getfixturevalue(notebook)
    complaining = [cell for cell, text in said.items() if "Traceback" in text or "Warning" in text]
    assert not complaining


def test_only_the_install_cell_installs():
    for name, installs in (("first_run", []), ("qwen3_free_gpu", ["install"])):
        cells = nbformat.read(EXAMPLES / f"{name}.ipynb", 4).cells
        assert [cell.id for cell in cells if "install" in cell.metadata.get("tags", [])] == installs
        assert all(("%pip" in cell.source) == (cell.id == "install") for cell in cells)


def test_a_cell_that_fails_is_not_passed_over(tmp_path):
    failing = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2, 'planted'")])
    with pytest.raises(CellExecutionError, match="planted"):
        execute(failing, tmp_path)
