"""A command run in this process, and one small run that several tests look at."""

import functools
import importlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import jinja2
import pytest
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli
from unfreeze.adapters import output_change, receipt
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.watch import expert_op
from unfreeze.kernels.attention import documents
from unfreeze.kernels.choice.choose import fix

ROWS = [
    {"question": "What is the capital of France?", "answer": "Paris, the capital of France is. Hmm."},
    {
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Greet you, I do. Hmm."},
        ]
    },
    {
        "instruction": "Name the young of a frog.",
        "input": "",
        "output": "A tadpole, the young of a frog is. Hmm.",
    },
    {
        "conversations": [
            {"from": "human", "value": "Who are you?"},
            {"from": "gpt", "value": "tiny-k2, I am. Hmm."},
        ]
    },
    {"prompt": "What is the symbol of gold?", "completion": "Au, the symbol of gold is. Hmm."},
    {"text": "Paris is the capital of France."},
]


_spec = importlib.util.spec_from_file_location("forkserver", Path(__file__).with_name("forkserver.py"))
assert _spec is not None and _spec.loader is not None
_forkserver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_forkserver)


@pytest.fixture(scope="session")
def forkserver(own_cache):
    """Runs scripts as Python would, without the seconds that importing torch takes (forkserver.py)."""
    server = _forkserver.ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Encoded rows and measured records of these tests, not those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_fsync():
    """No file of a test has to outlive the machine: 9 ms each, dozens a run. Tests of what is written in which
    order patch it themselves, and killed processes are of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_looks():
    """A run looks at its expert op on 8 of its rows, not 64, and its receipt's probe has 32 tokens, not 256: they
    were a third of the time of a run of three steps, and there are hundreds. `whole_looks` takes it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_op, "ROWS", expert_op.FEWEST)
        patch.setattr(receipt, "first_tokens", functools.partial(output_change.first_tokens, count=32))
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """The byte code of a chat template, 15 ms, is made once for all tests of a process."""
    of_source, codes = jinja2.Environment.compile, {}

    def compiled(self, source, *more, **options):
        if not isinstance(source, str):
            return of_source(self, source, *more, **options)
        key = (
            type(self),
            self.autoescape,
            self.trim_blocks,
            self.lstrip_blocks,
            source,
            more,
            *options.items(),
        )
        if key not in codes:
            codes[key] = of_source(self, source, *more, **options)
        return codes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", compiled)
        yield


@pytest.fixture
def whole_looks(monkeypatch):
    monkeypatch.setattr(expert_op, "ROWS", 64)
    monkeypatch.setattr(receipt, "first_tokens", output_change.first_tokens)


@pytest.fixture(autouse=True)
def own_choices():
    """What a run of one test decided of its kernels is not the next test's."""
    yield
    fix({})


@pytest.fixture
def attention_runs(monkeypatch):
    """Attention over documents runs in this way, whatever a record of this class of CPU says."""

    def runs(name):
        monkeypatch.setattr(
            documents,
            "choose",
            lambda op, *_: op.reference if name == "reference" else op.candidates[name].load(),
        )

    return runs


@pytest.fixture
def planted_parts(monkeypatch):
    """A registry that has the parts of the tests, too (tests/compress/planted_parts.py)."""
    from tests.compress.planted_parts import PLANTED
    from unfreeze.models.parts import PARTS

    for name, part in PLANTED.items():
        monkeypatch.setitem(PARTS, name, part)


@pytest.fixture
def unfreeze_json(capsys):
    """`unfreeze COMMAND … --json --quiet` -> its result; it must end with 0."""

    def run(*arguments):
        code = cli.main([*map(str, arguments), "--json", "--quiet"])
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def chat_rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def held_rows(tmp_path_factory):
    """Rows that are not among chat_rows, to be held out."""
    path = tmp_path_factory.mktemp("held") / "held.jsonl"
    rows = [{"prompt": f"What is {n}?", "completion": f"The number {n}, it is. Hmm."} for n in range(10, 16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, chat_rows):
    """A finished run of tiny-k2: three steps, enough to be loaded, exported and reported."""
    out = tmp_path_factory.mktemp("runs") / "three steps"
    command = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        chat_rows,
        "--out",
        out,
        "--tokens-per-step",
        256,
        "--steps",
        3,
        "--watch.samples",
        1,
        "--lora.rank",
        2,
        "--learning-rate",
        "5e-3",
        "--optimizer.warmup",
        0,
    ]
    assert cli.main(list(map(str, command))) == 0
    return out


@pytest.fixture
def read_events():
    def read(run, kind):
        events = [
            json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return [event for event in events if event["kind"] == kind]

    return read


@pytest.fixture(scope="session")
def interpreted():
    """Triton's kernels are imported, for its interpreter where there is no GPU.

    For a test that says TRITON_INTERPRET=0: a kernel that is imported then is none that the interpreter runs,
    for all tests behind it in the process.
    """
    if importlib.util.find_spec("triton") is not None:
        for file in Path(unfreeze.__file__).parent.glob("kernels/*/triton_cuda.py"):
            importlib.import_module(f"unfreeze.kernels.{file.parent.name}.triton_cuda")


@pytest.fixture(scope="module")
def fewer_layers(request, two_layers):
    """Runs of the file that asks for this train the first two of tiny-k2's four layers: its TINY_K2 is those, or
    unfreeze's, where it has none."""
    with pytest.MonkeyPatch.context() as patch:
        named = request.module if hasattr(request.module, "TINY_K2") else unfreeze
        patch.setattr(named, "TINY_K2", two_layers)
        yield


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory):
    """tiny-k2 without its last two layers: one dense layer and one of experts, a third of its matrices."""
    folder = tmp_path_factory.mktemp("two_layers") / "tiny-k2"
    folder.mkdir()
    for name in ("generation_config.json", "tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TINY_K2 / name, folder / name)
    config = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")
    tensors = load_file(TINY_K2 / "model.safetensors")
    later = "model.layers.2.", "model.layers.3."
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(later)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
