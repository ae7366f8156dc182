"""Faults that fuzzing found, each by its name; and what must never happen: code from a checkpoint that runs,
a file outside that is read."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze import cli
from unfreeze.adapters import load_adapter
from unfreeze.checkpoint import manifest, open_checkpoint
from unfreeze.commands.inspect import inspect
from unfreeze.config.parse import parse
from unfreeze.core.errors import AdapterError, CheckpointError, ConfigError, DataError, UserError
from unfreeze.data import load_tokenizer, read_rows
from unfreeze.generate.open import open_model
from unfreeze.quant import recognise
from unfreeze.recipes.sft import Config
from unfreeze.report.events import number, read_events
from unfreeze.report.run import first_event_time, read_run
from unfreeze.train.run import Run

HUGE, DEEP = "9" * 5000, "[" * 100_000


@pytest.fixture
def folder(fuzzers, tmp_path):
    """A good checkpoint folder of a family; each test breaks one thing in it."""

    def make(family: str = "llama") -> Path:
        fuzzers.spread(fuzzers.checkpoint(family), tmp_path / family)
        return tmp_path / family

    return make


def refused(call: Any, *arguments: Any, kind: type[UserError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert str(caught.value.message).isprintable()
    return caught.value.message


def header(file: Path, edit: Any) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = edit if isinstance(edit, bytes) else json.dumps(edit(json.loads(raw[8 : 8 + length]))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def config(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path


@pytest.mark.parametrize(
    "text", [HUGE, DEEP, '{"a":' * 100_000, "", "\ufeff", '{"a": 1, "a": 2}', "[]", '"x"']
)
def test_json_that_no_parser_likes(folder, text):
    path = folder()
    for name in ("generation_config.json", "config.json"):
        (path / name).write_text(text)
        assert name in refused(open_checkpoint, path)


def test_a_json_file_too_large_to_read(folder, tmp_path):
    path = folder()
    with (path / "config.json").open("r+b") as file:
        file.truncate(10**12)  # a hole: 1 TB that takes no disk
    assert "1,000,000,000,000 bytes" in refused(open_checkpoint, path)
    with (tmp_path / "run.toml").open("wb") as file:
        file.truncate(10**12)
    assert "at most 1,000,000" in refused(
        lambda: parse(Config, [str(tmp_path / "run.toml")], command="sft", description=""), kind=ConfigError
    )


@pytest.mark.parametrize(
    "shape",
    [
        [2] * 5000,
        [10**4000, 10**4000],
        [0, 2**62, 2**62],
        [2**62, 4],
        [1] * 65,
        ["16"],
        [True, 16],
        [-1, -16],
        [16.0],
    ],
)
def test_shapes_that_no_tensor_has(folder, shape):
    path = folder()
    raw = (
        json.dumps(shape)
        if not isinstance(shape[0], int) or abs(shape[0]) < 10**20
        else f"[1{'0' * 4000}, 1{'0' * 4000}]"
    )
    header(
        path / "model.safetensors",
        lambda h: {**h, "model.norm.weight": {**h["model.norm.weight"], "shape": "SHAPE"}},
    )
    header(
        path / "model.safetensors",
        (path / "model.safetensors").read_bytes()[8:].split(b"}}")[0].replace(b'"SHAPE"', raw.encode())
        + b"}}",
    )
    assert "malformed" in refused(open_checkpoint, path)


def test_a_header_that_is_nested_or_has_an_endless_number(folder):
    path = folder()
    for text in (
        DEEP.encode(),
        b'{"a": ' + HUGE.encode() + b"}",
        b'{"a":' * 50_000,
        b'{"__metadata__": {"a": "\\ud83d"}}',
        b'{"\\udc00": {}}',
    ):
        header(path / "model.safetensors", text)
        assert "damaged header" in refused(open_checkpoint, path)


def test_names_with_escape_sequences_and_newlines_stay_in_one_printable_line(folder):
    path = folder()
    header(path / "model.safetensors", lambda h: {**h, "\x1b[2J\nrm -rf": 1})
    assert r"\x1b[2J\nrm -rf" in refused(open_checkpoint, path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path, monkeypatch, name):
    path = folder()
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    assert "leads out of its folder" in refused(open_checkpoint, path)
    # control: without the guard the file outside is read
    monkeypatch.setattr(manifest, "inside", lambda path: path)
    assert open_checkpoint(path).tensors


def test_a_link_inside_the_folder_and_a_linked_folder_are_followed(folder, tmp_path):
    path = folder()
    (path / "model.safetensors").rename(path / "weights.bytes")
    (path / "model.safetensors").symlink_to("weights.bytes")
    (tmp_path / "there").symlink_to(path)
    assert open_checkpoint(tmp_path / "there").tensors


def test_an_adapter_file_that_is_a_link_out(fuzzers, tmp_path):
    fuzzers.spread(fuzzers.adapter("llama", "per-expert"), tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "leads out" in refused(load_adapter, fuzzers.good_model("llama"), tmp_path / "a", kind=UserError)


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.write_text, (Path(self.path), "ran"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_never_read_and_the_conversion_that_is_named_works(folder, tmp_path, forkserver, name):
    path = folder()
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    torch.save(Evil(canary), path / name)
    assert "unpickling can run any code" in refused(open_checkpoint, path)
    assert "unpickling can run any code" in refused(open_checkpoint, path / name)
    assert not canary.exists()
    torch.load(path / name, weights_only=False)  # control: this is what reading it would have done
    assert canary.exists()
    canary.unlink()
    torch.save(tensors, path / name)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    if name.endswith(".bin"):  # one process is enough: the command differs in the file's name
        assert len(caught.value.next.replace(str(path), "")) < 200
        command = caught.value.next.removeprefix('python -c "').removesuffix('"')
        assert forkserver.run(["-c", command]).returncode == 0
        converted = load_file(path / "model.safetensors")
        assert all(torch.equal(converted[n], tensors[n]) for n in tensors) and open_model(
            open_checkpoint(path)
        )


def test_an_adapter_pickle_is_refused(fuzzers, tmp_path):
    fuzzers.spread(fuzzers.adapter("llama", "per-expert"), tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    message = refused(load_adapter, fuzzers.good_model("llama"), tmp_path, kind=AdapterError)
    assert "adapter_model.bin, a pickle" in message


def test_code_beside_a_checkpoint_is_never_run(folder, tmp_path):
    """docs/why/trust.md L9: auto_map and tokenization_*.py are what trust_remote_code would run."""
    path, canary = folder("kimi"), tmp_path / "canary"
    for name in (
        "tokenization_kimi.py",
        "modeling_deepseek.py",
        "configuration_deepseek.py",
        "__init__.py",
        "conftest.py",
        "sitecustomize.py",
    ):
        (path / name).write_text(f"open({str(canary)!r}, 'w').write('ran')\n")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}})
    )
    config(
        path,
        auto_map={"AutoConfig": "configuration_deepseek.C", "AutoModelForCausalLM": "modeling_deepseek.M"},
        trust_remote_code=True,
    )
    inspect(str(path))
    load_tokenizer(path).encode("hello", specials=True)
    open_model(open_checkpoint(path))
    assert not canary.exists()
    # control: the planted file does what it says when it is run
    runpy.run_path(str(path / "tokenization_kimi.py"))
    assert canary.exists()


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"hidden_size": 10**12},
            "hidden_size is 1,000,000,000,000; it must be a whole number from 1 to 1,048,576",
        ),
        ({"num_hidden_layers": 10_000}, "60,000 tensors; the files hold"),
        ({"n_routed_experts": 60_000}, "1 layers x 60,000 experts x 3 matrices of 32 x 32 = 184 M"),
        ({"vocab_size": 16_000_000}, "vocab_size 16,000,000 x hidden_size 32 = 512 M"),
    ],
)
def test_absurd_sizes_are_refused_with_arithmetic(folder, fields, words):
    assert words in refused(lambda path: open_model(open_checkpoint(path)), config(folder("kimi"), **fields))


@pytest.mark.parametrize("form", ["[", "(a+)+$", ".*.*.*.*.*.*x", 5])
def test_patterns_that_are_none_or_take_forever(fuzzers, tmp_path, form):
    quantization = json.loads(json.dumps(fuzzers.KIMI["quantization_config"]))
    quantization["ignore"] = [f"re:{form}" if isinstance(form, str) else form]
    refused(recognise, {"quantization_config": quantization}, kind=ConfigError)
    if isinstance(form, str):
        files = dict(fuzzers.adapter("llama", "per-expert"))
        files["adapter_config.json"] = json.dumps(
            {**json.loads(files["adapter_config.json"]), "rank_pattern": {form: 2}}
        ).encode()
        fuzzers.spread(files, tmp_path / "a")
        refused(load_adapter, fuzzers.good_model("llama"), tmp_path / "a", kind=AdapterError)


@pytest.mark.parametrize(
    "field, value",
    [
        ("r", 0),
        ("r", 2.5),
        ("r", True),
        ("lora_alpha", float("nan")),
        ("lora_alpha", "16"),
        ("rank_pattern", [1]),
        ("alpha_pattern", {"q_proj": -1}),
        ("target_parameters", "x"),
        ("use_rslora", "no"),
    ],
)
def test_adapter_config_fields(fuzzers, tmp_path, field, value):
    files = dict(fuzzers.adapter("llama", "per-expert"))
    files["adapter_config.json"] = json.dumps(
        {**json.loads(files["adapter_config.json"]), field: value}
    ).encode()
    fuzzers.spread(files, tmp_path)
    refused(load_adapter, fuzzers.good_model("llama"), tmp_path, kind=AdapterError)


@pytest.mark.parametrize(
    "spoil, words",
    [(lambda t: t * float("nan"), "NaN or infinity"), (lambda t: t.to(torch.int32), "is torch.int32")],
)
def test_an_adapter_of_no_finite_floats_is_refused_and_the_model_untouched(fuzzers, tmp_path, spoil, words):
    fuzzers.spread(fuzzers.adapter("llama", "per-expert"), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = next(iter(tensors))
    save_file({**tensors, first: spoil(tensors[first])}, tmp_path / "adapter_model.safetensors")
    model = fuzzers.good_model("llama")
    assert words in refused(load_adapter, model, tmp_path, kind=AdapterError)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "line",
    [
        'model = "--help"',
        'model = "m"\nout = "--steps"',
        'model = "m"\n[lora]\ntargets = ["--out", "elsewhere"]',
    ],
)
def test_a_toml_value_is_never_a_flag(tmp_path, line, capsys):
    (tmp_path / "run.toml").write_text(f'data = "d.jsonl"\n{line}\n')
    made = parse(Config, [str(tmp_path / "run.toml")], command="sft", description="")
    assert made.out in ("", "--steps") and made.training.steps is None and made.model in ("m", "--help")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "line, words",
    [
        ("steps = true", "steps = True"),
        ('steps = "5"', "steps = '5'"),
        ("learning_rate = inf", "finite number"),
        ("learning_rate = nan", "finite number"),
        ("steps = 1.5", "steps = 1.5"),
        ("seed = -1", "seed = -1"),
        (f"steps = {HUGE}", "not valid TOML"),
        ('out = "\\u0000"', "NUL"),
        ("lora = 3", "should be a table"),
    ],
)
def test_toml_values_of_another_type_or_out_of_range(tmp_path, line, words):
    (tmp_path / "run.toml").write_text(f'model = "m"\ndata = "d.jsonl"\n{line}\n')
    assert words in refused(
        lambda: parse(Config, [str(tmp_path / "run.toml")], command="sft", description=""), kind=ConfigError
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--steps abc", "--steps"),
        ("--lora.rnak 3", "nearest: '--lora.rank'"),
        ("--steps", "--steps needs a value"),
        ("--learning-rate nan", "finite"),
        ("--dtype int8", "'int8'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(capsys, flags, words):
    assert cli.main(["sft", "--model", "m", "--data", "d", *flags.split()]) == 2
    message, following = capsys.readouterr().err.splitlines()
    assert message.startswith("ConfigError: ") and words in message and following.startswith("  next: ")


def test_every_command_prints_one_line_and_exits_with_2_on_a_broken_folder(folder, fuzzers, tmp_path, capsys):
    broken = folder()
    header(broken / "model.safetensors", DEEP.encode())
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text(DEEP + "\n")
    (tmp_path / "run" / "resolved_config.json").write_text(DEEP)
    for command in (
        ["inspect", broken],
        ["generate", broken, "--prompt", "x"],
        ["export", broken],
        ["report", tmp_path / "run"],
        ["chat", broken],
        ["sft", "--model", broken, "--data", tmp_path / "d.jsonl", "--out", tmp_path / "out"],
        ["generate", tmp_path / "run"],
    ):
        assert cli.main([*map(str, command), "--quiet"]) == 2, command
        said = capsys.readouterr()
        assert [line[:8] for line in said.err.splitlines()][1:] in (
            [],
            ["  next: "],
        ) and "Traceback" not in said.err + said.out


def test_a_damaged_line_of_events_is_named_on_resume_and_half_a_line_at_the_end_is_dropped(fuzzers, tmp_path):
    events = fuzzers.run_folder()["events.jsonl"]
    (tmp_path / "events.jsonl").write_bytes(events + b'{"kind": "tr')
    with Run(tmp_path, {}):
        pass
    for bad in (b"\xff", b"[]", b"{}", DEEP.encode(), b'{"kind": "x", "step": "1"}'):
        (tmp_path / "events.jsonl").write_bytes(bad + b"\n" + events)
        assert "line 1 is not an event" in refused(Run, tmp_path, {}, kind=DataError)


def test_a_report_of_damaged_numbers(fuzzers, tmp_path):
    assert number(10**4000) is None
    (tmp_path / "bad.jsonl").write_text('{"kind": "train", "step": 3, "expert_load": {"1": ["x"]}}\n')
    said = refused(read_events, tmp_path / "bad.jsonl", kind=DataError)
    assert "line 1: train.expert_load.1.0 is 'x'" in said
    fuzzers.spread(fuzzers.run_folder(), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({**event, "time": 1e300}) + "\n" for event in events)
    )
    assert first_event_time(read_run(tmp_path)) == ""
    (tmp_path / "receipt.json").write_text('{"groups": [1]}')
    assert "receipt" in refused(read_run, tmp_path, kind=DataError)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80",
        b"\xef\xbb\xbf\xff",
        b"\xff\xfe",
        b'{"text": ' + b"[" * 100_000,
        b'{"text": ' + HUGE.encode() + b"}",
        b'{"text": "\\ud800"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": Infinity}',
        b"\x00",
        b'{"text": "a"}\x00',
    ],
)
def test_rows_that_are_none(tmp_path, raw):
    (tmp_path / "d.jsonl").write_bytes(b"\n" + raw)
    message = refused(lambda: list(read_rows(tmp_path / "d.jsonl")), kind=DataError)
    assert "row 2" in message or "UTF-16" in message
    bad: list[Any] = []
    assert list(read_rows(tmp_path / "d.jsonl", bad.append)) == [] and [item.row for item in bad] == [2]


@pytest.mark.parametrize(
    "name, text",
    [
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
        ("tokenizer_config.json", DEEP.encode()),
        ("tokenizer_config.json", b'{"additional_special_tokens": 1.5}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"-1": {"content": "x"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"99999999999": {"content": "x"}}}'),
        ("config.json", b'{"vocab_size": "many"}'),
        ("config.json", b'{"vocab_size": 1000000000000}'),
        ("tiktoken.model", b"!!!! 0\n"),
        ("tiktoken.model", b""),
        ("config.json", b'{"eos_token_id": "x"}'),
    ],
)
def test_tokenizer_files(folder, name, text):
    path = folder("kimi")
    (path / name).write_bytes(text)
    refused(load_tokenizer, path)


def test_reserved_ids_without_end(folder):
    assert "reserved ones, the limit is 65,536" in refused(
        load_tokenizer, config(folder("kimi"), vocab_size=1_000_000)
    )


@pytest.mark.parametrize("metadata", [[], [1], {"format": 1}, "x", 0])
def test_metadata_that_is_no_table_of_texts(folder, metadata):
    path = folder()
    header(path / "model.safetensors", lambda h: {**h, "__metadata__": metadata})
    assert "__metadata__ is not a table of texts" in refused(open_checkpoint, path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("step", 2),
        ("-step", None),
        ("-cursor", None),
        ("step", 10**6),
        ("step", "1"),
        ("cursor", [1]),
        ("schedule", {}),
        ("optimizer", None),
    ],
)
def test_a_state_whose_fields_were_changed(fuzzers, tmp_path, field, value):
    fuzzers.spread(fuzzers.run_folder(), tmp_path)
    file = tmp_path / "state" / "step-000001" / "state.json"
    record = {**json.loads(file.read_text()), field: value}
    if field.startswith("-"):  # absent
        del record[field[1:]]
    file.write_text(json.dumps(record))
    assert "is damaged" in refused(Run, tmp_path, fuzzers.run_config())


def test_a_state_that_holds_nan_is_not_resumed(fuzzers, tmp_path):
    fuzzers.spread(fuzzers.run_folder(), tmp_path)
    file = tmp_path / "state" / "step-000001" / "tensors.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("model."))
    save_file({**tensors, name: tensors[name] * float("nan")}, file)
    with Run(tmp_path, fuzzers.run_config()) as run:
        assert "holds NaN or infinity" in refused(fuzzers.fresh_state, run)
