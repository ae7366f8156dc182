"""Claims about what an installed unfreeze has: its files, its version, and what it does with the core alone."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from tokenizers.pre_tokenizers import ByteLevel

import unfreeze
from unfreeze import models
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.models.publish import published

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "unfreeze"
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def unpacked(globs: list[str]) -> set[str]:
    """Files beside the modules that these patterns of package-data leave out of a wheel."""
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    packed = {path for glob in globs for path in PACKAGE.glob(glob)}
    return {path.relative_to(PACKAGE).as_posix() for path in files - packed if path.suffix != ".py"}


def test_every_file_of_the_package_is_in_its_wheel():
    globs = PROJECT["tool"]["setuptools"]["package-data"]["unfreeze"]
    assert not unpacked(globs), "add a pattern to package-data in pyproject.toml"
    assert unpacked([glob for glob in globs if "records" not in glob])  # control arm


def test_every_folder_of_modules_is_a_package():
    """setuptools' find leaves out a folder without __init__.py, and the files below it."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not {str(folder) for folder in folders if not (folder / "__init__.py").exists()}


def test_the_version_stands_once():
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "unfreeze.__version__"


EXTRAS = PROJECT["project"]["optional-dependencies"]


def named(requirements: list[str]) -> set[str]:
    """The packages of these requirements, without versions."""
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}


# What a user may be without: every extra, and of the core what only some models and ids need.
BLOCKED = {*named([one for extra in EXTRAS.values() for one in extra]), "PIL", "huggingface_hub", "tiktoken"}
BARE = """
import json, sys
blocked, lines = map(tuple, json.loads(sys.argv[1]))
network = ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto")
sys.addaudithook(lambda event, of: event in network and print(event, of[1:], file=sys.stderr))
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent)
from unfreeze import cli
for line in lines:
    print("code", cli.main(line), flush=True)
sys.stderr.write("control arm\\n")
import socket
socket.socket().bind(("127.0.0.1", 0))
assert not set(blocked) & set(sys.modules)
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A Qwen3 of 7 thousand weights with a tokenizer.json of bytes."""
    folder = tmp_path_factory.mktemp("bare") / "dense"
    model = models.build(models.shape(QWEN3), dtype=torch.float32, device="cpu")
    models.initialize(model, seed=0)
    save_checkpoint(folder, QWEN3, published(model, QWEN3))
    bytes_only = tokenizers.Tokenizer(
        tokenizers.models.BPE({sign: id for id, sign in enumerate(ByteLevel.alphabet())}, [])
    )
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bare(dense: Path, tmp_path_factory) -> tuple[Path, list[int], str]:
    """Folder, exit codes and stderr of DONE and REFUSED, where only the core is installed."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "text.jsonl").write_text('{"text": "Paris is the capital of France."}\n' * 8)
    (folder / "held.jsonl").write_text('{"text": "Rome is the capital of Italy."}\n')
    (folder / "chat.parquet").write_bytes(b"PAR1")
    places = {"DENSE": str(dense), "KIMI": str(TINY_K2)}
    lines = [[places.get(word, word) for word in line.split()] for line in (*DONE, *REFUSED.values())]
    asked = json.dumps([sorted(BLOCKED - {"unfreeze", "triton"}), lines])
    done = subprocess.run(
        [sys.executable, "-c", BARE, asked], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("code ")]
    return folder, codes, done.stderr


SFT = "sft --quiet --steps 2 --tokens-per-step 128"
DONE = (
    f"{SFT} --out run --model DENSE --data text.jsonl --validation held.jsonl --watch.validate-every 1",
    "report run --quiet",
    "plan --model DENSE --hardware 1xH100 8xH100 --quiet",
    "inspect DENSE --quiet",
    "--version",
)
REFUSED = {
    "tiktoken": f"{SFT} --model KIMI --data text.jsonl",
    "huggingface_hub": f"{SFT} --model org/name --data text.jsonl",
    "pyarrow": f"{SFT} --model DENSE --data chat.parquet",
    "datasets": f"{SFT} --model DENSE --data hf:org/name",
    "openai": "generate http://127.0.0.1:1 --data text.jsonl --out answers.jsonl",
    "wandb": f"{SFT} --model DENSE --data text.jsonl --watch.track wandb",
}


def test_the_core_trains_plans_and_reports(bare: tuple[Path, list[int], str]):
    folder, codes, said = bare
    assert codes[: len(DONE)] == [0] * len(DONE), said
    before, after = said.split("control arm")
    assert "socket" not in before and "socket.bind" in after  # nothing listens, nobody is asked (SECURITY.md)
    assert (folder / "run" / "report.html").read_text(encoding="utf-8").count("<svg") >= 4


def test_what_is_not_installed_is_one_line_with_the_command_that_installs_it(
    bare: tuple[Path, list[int], str],
):
    _, codes, said = bare
    assert codes[len(DONE) :] == [2] * len(REFUSED), said
    refused = said[said.index("CheckpointError") : said.index("control arm")].splitlines()
    assert refused[1::2] == [f"  next: pip install {name}" for name in REFUSED], said
    assert len(refused) == 2 * len(REFUSED), said  # what is missing, and the command


def test_the_changelog_has_what_is_unreleased_and_this_version():
    headings = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", unfreeze.__version__]


def test_the_tests_have_every_extra():
    brought = re.search(r"unfreeze\[([\w,]+)\]", " ".join(EXTRAS["dev"]))
    assert brought and set(brought[1].split(",")) == EXTRAS.keys() - {"dev"}


def test_every_requirement_is_pinned_for_make():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0].lower() for line in pins.splitlines()}
    asked = named([*PROJECT["project"]["dependencies"], *(one for extra in EXTRAS.values() for one in extra)])
    assert {name.lower() for name in asked - {"unfreeze"}} <= pinned


def from_an_index(text: str) -> list[str]:
    """Commands that would take a package of this name from an index, where it is not published."""
    return re.findall(r"pip install(?: [^`\n]*?)?['\" ]unfreeze(?![/\w.-])[^`\n]*", text)


def test_nothing_says_that_it_is_on_a_package_index():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.ipynb")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*pages, *PACKAGE.rglob("*.py"))}
    assert not {name: hits for name, text in texts.items() if (hits := from_an_index(text))}
    assert from_an_index("`pip install 'unfreeze[data]'`") and from_an_index("uv pip install unfreeze")
    assert not from_an_index("%pip install --quiet ./unfreeze")


def test_a_release_takes_actions_by_hash_and_only_its_last_job_may_publish():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    uses = [step["uses"] for step in (*build["steps"], *publish["steps"]) if "uses" in step]
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use) for use in uses)
    assert release["permissions"] == {} and build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert not any(
        "run" in step for step in publish["steps"]
    )  # nothing of the repository's runs with its token
    assert any(".ci/wheel" in step.get("run", "") for step in build["steps"])


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda file: file.stem)
def test_an_image_has_no_build_in_it_and_does_not_run_as_root(file: Path):
    lines = file.read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("FROM "))
    stages, final = [line for line in lines if line.startswith("FROM ")], lines[last:]
    assert len(stages) == 2 and not any("pip install" in line or line.startswith("COPY . ") for line in final)
    assert [line for line in final if line.startswith("USER ")] == ["USER 1000"]
