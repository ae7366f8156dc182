"""The doctor finds what is planted in a user's files, says the remedy, and finds nothing in clean ones
(control arm of every plant)."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.doctor import Config, findings_of
from unfreeze.core.command import Common
from unfreeze.drill.sandbox import ROWS, Sandbox
from unfreeze.job.doctor import checks, gpu
from unfreeze.job.opening.device import load_shown
from unfreeze.job.planning import plan as run_plan
from unfreeze.kernels import cards
from unfreeze.kernels.choice import checked, choose, ops, times
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.train.run import Run


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("doctor"))


def findings(**fields):
    return {
        f"{f.check} {f.level}": f
        for f in findings_of(Config(**{name: str(value) for name, value in fields.items()}))
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "deepseek_v3-int4"])
def test_clean_files_have_no_fault(sandbox, family, tmp_path):
    (tmp_path / "run.toml").write_text("steps = 8\n")
    given = {"config": tmp_path / "run.toml", "data": sandbox.rows()}
    found = findings(model=sandbox.checkpoint(family), **given)
    assert {f.level for f in found.values() if f.check != "machine"} == {"ok"}
    alone = [name for name, _, _ in checks.CHECKS if name != "second"]  # there is no second model
    assert list(dict.fromkeys(f.check for f in found.values())) == alone


def test_a_runs_file_alone_says_model_and_data(sandbox, tmp_path, unfreeze_json):
    fields = f'model = "{sandbox.checkpoint("llama")}"\nsteps = 8\n'
    (tmp_path / "run.toml").write_text(fields + f'[data]\nfiles = "{sandbox.rows()}"\n')
    found = unfreeze_json("doctor", tmp_path / "run.toml")
    named = unfreeze_json("doctor", sandbox.checkpoint("llama"), "--config", tmp_path / "run.toml")
    assert found["faults"] == 0 and "skip" not in {finding["level"] for finding in found["findings"]}
    assert [f["line"] for f in found["findings"] if f["check"] in ("checkpoint", "data")] == [
        f["line"] for f in named["findings"] if f["check"] in ("checkpoint", "data")
    ]


def test_data_of_any_form_is_looked_through(sandbox, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("task,reply\n" + "".join(f"{i}?,{i}.\n" for i in range(4)))
    config = Config(
        model=str(sandbox.checkpoint("llama")),
        data=str(tmp_path / "d"),
        columns=("prompt=task", "completion=reply"),
    )
    (found,) = [finding for finding in findings_of(config) if finding.check == "data"]
    assert found.level == "ok" and "4 rows (prompt/completion 4)" in found.line


def test_prompts_are_called_prompts(sandbox, tmp_path):
    """Without a run's file all other checks are made; with one, the steps are those of answers."""
    data, my, toml = tmp_path / "prompts.jsonl", tmp_path / "my.py", tmp_path / "run.toml"
    data.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(20)))
    my.write_text("def reward(prompt, completion): return 1.0")
    alone = findings(model=sandbox.checkpoint("llama"), data=data)
    assert "prompts without answers" in alone["config warn"].line
    assert "unfreeze reward show my.py" in alone["config warn"].remedy
    assert not any(f.level == "fault" for f in alone.values()) and "steps skip" in alone
    assert "20 rows (prompt/completion 20)" in alone["data ok"].line
    toml.write_text(f'reward = "{my}"\nprompts_per_step = 8\nmax_new_tokens = 400\nepochs = 4\n')
    run = findings(model=sandbox.checkpoint("llama"), data=data, config=toml)
    assert not any(f.level in ("warn", "fault") for f in run.values() if f.check != "machine")
    assert run["steps ok"].line == "10 steps of 64 answers to 8 of 20 prompts"
    assert "room for 400 more in each" in run["data ok"].line


@pytest.mark.parametrize("toml, works", [("", False), ("tokens_per_step = 256", True)])
def test_a_longer_length_is_advised_where_the_model_takes_it(toml, works, sandbox, tmp_path):
    (tmp_path / "run.toml").write_text(toml)
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"question": "Why? " * 10, "answer": "word " * 2000}) + "\n"
    )
    given = {"config": tmp_path / "run.toml", "data": tmp_path / "long.jsonl"}
    found = findings(model=sandbox.checkpoint("llama"), **given)["data warn"]
    assert ("--sequence-length" in found.remedy) == works and "split" not in found.remedy
    assert ("the model takes 512 positions at most" in found.remedy) != works
    assert f"cut at {256 if works else 512} tokens" in found.line


@pytest.mark.parametrize("name, level", [("notes.txt", "run fault"), ("events.jsonl", "run ok")])
def test_a_run_folder_with_other_files_is_said_before_the_run(name, level, sandbox, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / name).write_text("hi")
    (tmp_path / "run.toml").write_text(f'out = "{tmp_path / "full"}"')
    given = {"config": tmp_path / "run.toml", "data": sandbox.rows()}
    found = findings(model=sandbox.checkpoint("llama"), **given)[level]
    assert ("holds other files (notes.txt)" in found.line) == (level == "run fault")


@pytest.mark.parametrize("toml, warned", [("", "few steps: 3 of"), ("epochs = 40", ""), ("steps = 3", "")])
def test_few_steps_are_said_as_a_run_says_them(toml, warned, sandbox, tmp_path):
    (tmp_path / "run.toml").write_text(toml)
    given = {"config": tmp_path / "run.toml", "data": sandbox.rows()}
    found = findings(model=sandbox.checkpoint("llama"), **given)
    if warned:
        assert warned in found["steps warn"].line and "--epochs 40" in found["steps warn"].remedy
    else:
        assert "steps of 4,096 tokens" in found["steps ok"].line


def cut_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lost_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def nan_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def fewer_rows(folder):
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:1500].clone()
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", vocab_size=1500)


def drops_answers(folder):
    text = "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' else '…' }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)


def no_end(folder):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def change_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "plant, key, says",
    [
        (cut_file, "checkpoint fault", "file is truncated"),
        (lost_tensor, "checkpoint fault", "tensors are missing; first: model.layers.1.mlp.up_proj.weight"),
        (
            nan_weight,
            "numerics fault",
            "1 tensor with NaN or infinity; first: model.layers.1.mlp.up_proj.weight",
        ),
        (fewer_rows, "tokenizer fault", "36 ids have no embedding"),
        (drops_answers, "template fault", "content"),
        (no_end, "template warn", "does not stop with an end token"),
    ],
)
def test_a_fault_planted_in_the_checkpoint_is_found(sandbox, plant, key, says):
    folder = sandbox.copy("llama")
    assert key not in findings(model=folder)  # control arm: without the plant
    plant(folder)
    found = findings(model=folder)
    assert says in found[key].line and found[key].remedy


def test_nan_among_the_scales_of_packed_weights_is_found_by_name(tmp_path):
    folder = tmp_path / "k2"
    shutil.copytree(TINY_K2, folder)
    assert "numerics fault" not in findings(model=folder)  # control arm
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale"][3, 1] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    found = findings(model=folder)["numerics fault"]
    assert (
        found.line
        == "1 tensor with NaN or infinity; first: model.layers.1.mlp.experts.down_proj.weight_scale"
    )
    assert found.remedy == "download the checkpoint again"


def test_what_needs_a_broken_part_is_skipped_with_the_reason(sandbox):
    folder = sandbox.copy("llama")
    cut_file(folder)
    found = findings(model=folder, data=sandbox.rows())
    assert (
        found["numerics skip"].line == "not checked: checkpoint has a fault"
        and "template skip" in found
        and "data skip" in found
    )


@pytest.mark.parametrize(
    "rows, key, says",
    [
        ([ROWS[0], "{broken", ROWS[1]], "data fault", "1 of 3 rows cannot be read: row 2: broken JSON"),
        ([ROWS[0], ROWS[1], ROWS[0]], "data warn", "1 of 3 rows are duplicates"),
        (
            [ROWS[0], {"question": "frog " * 600, "answer": "Hmm."}],
            "data warn",
            "row 2: 0 of 512 tokens supervised",
        ),
        ([ROWS[0], {"question": "Q", "answer": "frog " * 600}], "data warn", "1 of 2 rows are cut at"),
        # 97 % of it is answer
        ([{"question": "Q", "answer": "frog " * 200}], "data warn", "is the mask lost?"),
    ],
)
def test_a_fault_planted_in_the_data_is_found(sandbox, rows, key, says, monkeypatch):
    if "mask" in says:
        monkeypatch.setattr(checks, "ALL_TAUGHT", 0.9)
    model = sandbox.checkpoint("llama")
    assert key not in findings(model=model, data=sandbox.rows())  # control arm
    assert says in findings(model=model, data=sandbox.rows(rows))[key].line


def test_a_run_that_is_left_resumes_and_one_that_is_done_is_finished(sandbox, tmp_path):
    model, data, out = sandbox.checkpoint("llama"), sandbox.rows(), tmp_path / "run"
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'model = "{model}"\ndata = "{data}"\nout = "{out}"\ntokens_per_step = 128\nsteps = 2\n[watch]\nsamples = 0\n'
    )
    for left_after in (1, 2):
        job = unfreeze.prepare(toml, quiet=True)
        for batch in job.batches:
            job.forward_backward(batch)
            job.optim_step()
            break
        ends = "resumes from step 1" if left_after == 1 else "is finished at step 2"
        assert findings(model=model, config=toml)["run ok"].line.endswith(ends)


def test_the_run_folder_held_or_of_another_configuration(sandbox, tmp_path):
    model, data, out = sandbox.checkpoint("llama"), sandbox.rows(), sandbox.fresh("run")
    toml = tmp_path / "run.toml"
    toml.write_text(f'model = "{model}"\ndata = "{data}"\nout = "{out}"\ntokens_per_step = 128\n')
    asked = {"model": model, "config": toml}
    assert findings(**asked)["run ok"].line.endswith("is new")
    with Run(out, {}):
        assert "is in use by process" in findings(**asked)["run fault"].line
    sandbox.sft(model=model, data=data, out=out)
    assert (
        "learning_rate" in findings(**asked)["run fault"].line
        and "another configuration" in findings(**asked)["run fault"].line
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    findings(**asked)
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before  # it writes nothing


def test_too_little_memory_and_disk_are_faults_with_the_arithmetic(sandbox, monkeypatch):
    from unfreeze.parallel.machine import Hardware

    model = sandbox.checkpoint("llama")
    monkeypatch.setattr(run_plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    assert "9.8 KiB free for" in findings(model=model)["disk fault"].line
    monkeypatch.setattr(
        "unfreeze.parallel.machine.hardware", lambda device: Hardware("cpu", "small", 1, 2**20, 2**20)
    )
    found = findings(model=model)
    assert "usable on small" in found["memory fault"].line and found["numerics skip"].line.startswith(
        "not checked: memory"
    )


def test_a_bad_config_is_the_first_finding(sandbox, tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text("learning_rat = 1.0\n")
    found = findings(model=sandbox.checkpoint("llama"), config=toml)
    assert "nearest: 'learning" in found["config fault"].line and len(found) == 1


def test_the_command_ends_with_2_on_a_fault(sandbox, capsys):
    folder = sandbox.copy("llama")
    assert cli.main(["doctor", str(folder), "--json"]) == 0
    nan_weight(folder)
    assert cli.main(["doctor", str(folder), "--json"]) == 2
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["faults"] == 1 and result["findings"][-1]["check"] == "numerics"
    assert cli.main(["doctor", str(folder)]) == 2
    assert "remedy: download the checkpoint again" in capsys.readouterr().out


def test_more_threads_than_cores_is_a_warning(sandbox, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    assert "999 threads" in findings(model=sandbox.checkpoint("llama"))["machine warn"].line


def test_a_field_that_is_not_followed_is_said_by_doctor_inspect_load_and_the_run(sandbox, tmp_path, caplog):
    import unfreeze
    from unfreeze.commands.inspect import inspect

    folder = sandbox.checkpoint("llama")
    change_json(folder / "config.json", clip_qkv=8.0)
    note = "config.json: clip_qkv = 8.0: unknown and ignored"
    found = findings(model=folder)
    assert found["checkpoint warn"].line == note and not [f for f in found.values() if f.level == "fault"]
    assert inspect(str(folder))["notes"] == [note]
    unfreeze.load(folder, dtype="float32")
    assert [record.getMessage() for record in caplog.records].count(note) == 1
    said: list[str] = []
    unfreeze.load(folder, say=said.append, dtype="float32")
    assert said == [note]
    out = tmp_path / "run"
    command = (
        f"sft --model {folder} --data {sandbox.rows()} --out {out} --steps 1 --tokens-per-step 256 --watch.samples"
        " 0 --quiet"
    )
    assert cli.main(command.split()) == 0
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["kind"] == "warning"].count(note) == 1


def test_a_quantization_that_only_hf_quant_config_names_is_refused_by_inspect_doctor_and_load(sandbox):
    import unfreeze
    from unfreeze.commands.inspect import inspect
    from unfreeze.core.errors import ConfigError

    folder = sandbox.copy("llama")
    assert inspect(str(folder))["format"] == "dense"  # control arm
    beside = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "W4A8_AWQ", "exclude_modules": ["lm_head"]},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    said = 'quant_method "modelopt", quant_algo "W4A8_AWQ" (hf_quant_config.json)'
    assert said in inspect(str(folder))["format"] and said in findings(model=folder)["checkpoint fault"].line
    with pytest.raises(ConfigError) as caught:
        unfreeze.load(folder, dtype="float32")
    assert said in caught.value.message


def test_without_a_gpu_one_line_and_code_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cards, "unused", lambda root: None)
    assert cli.main(["doctor", "--gpu"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "this machine has no GPU" in line and "unfreeze doctor --ops" in line
    assert cli.main(["doctor"]) == 2 and "doctor needs a MODEL" in capsys.readouterr().err


def planted(candidate):
    made = Candidate(lambda: candidate, lambda *_: "")
    case = Case(
        "any", lambda d, t, g: (torch.randn(64, generator=g).to(d, t).requires_grad_(),), (torch.float32,)
    )
    return Op("double", lambda x: x + x, {"quick": made}, (case,), {torch.float32: 1e-6})


@pytest.fixture
def own_cache_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    monkeypatch.chdir(tmp_path)
    for cache in (choose._loaded, times._read):
        cache.cache_clear()
    yield tmp_path
    for cache in (choose._loaded, times._read):
        cache.cache_clear()


def test_the_table_of_this_cpu_bans_a_wrong_kernel_and_keeps_no_other_row(
    own_cache_here, monkeypatch, capsys
):
    for factor, code in ((2, 0), (2.1, 1)):
        op = planted(lambda x, factor=factor: factor * x)
        monkeypatch.setattr(ops, "import_op", lambda name, op=op: op)
        choose._loaded.cache_clear()
        assert cli.main(["doctor", "--ops", "--op", "double"]) == code
        out = capsys.readouterr().out
        assert ("quick is WRONG: error 5.0e-02" in out) == bool(code)
        assert ("1 with a wrong kernel" in out) == bool(code) and ("--bundle" in out) == bool(code)
        key = ("double", "float32", "any")
        assert bool(times.wrong(torch.device("cpu"), key)) == bool(code) and not times.known()
    assert choose.by_record(op, torch.device("cpu"), torch.float32, "any").runs == "reference"
    # the bundle says so, and nothing of where it is
    assert cli.main(["doctor", "--bundle"]) == 0
    text = (own_cache_here / "unfreeze-bundle.txt").read_text()
    assert "double, any, float32: quick is wrong: error 5.0e-02" in text
    assert str(own_cache_here) not in text and f"torch {torch.__version__}" in text


def test_an_unknown_op_is_named(capsys):
    assert cli.main(["doctor", "--ops", "--op", "rms_nrom"]) == 2
    assert "rms_norm" in capsys.readouterr().err


SECRETS = ("hf_AbCdEfGhIjKlMnOp", "sk-proj-abcdef123456", "a" * 40, "my very own password")


def test_a_bundle_has_no_secret_path_or_text_of_the_data(own_cache_here, monkeypatch):
    run = own_cache_here / "runs" / "mine"
    run.mkdir(parents=True)
    config = {
        "model": f"{run}/model",
        "out": "/home/ada/x.json",
        "url": "https://u:pw12345678@host.org/v1",
        "hub": "s3://bucket-of-mine/x",
        "files": ["/data/my (old) déjà vu, 2/x.jsonl"],
        "cache": "/home/ada",
        "watch.prompts": ["PRIVATE"],
        "data.template_variables": ["customer=PRIVATE"],
        "steps": 7,
    }
    (run / "resolved_config.json").write_text(json.dumps(config))
    sample = {
        "kind": "sample",
        "step": 0,
        "time": 0.0,
        "when": "before",
        "prompt": "PRIVATE",
        "text": "PRIVATE",
    }
    data = {
        "kind": "data",
        "step": 0,
        "time": 0.0,
        "rows": 3,
        "summary": "x",
        "listed": [{"row": 1, "reason": "PRIVATE"}],
    }
    words = (
        f"{SECRETS[0]} in C:\\Users\\ada\\file.json, {SECRETS[1]}, {SECRETS[2]}, ~/models/k2, {SECRETS[3]}"
    )
    warning = {"kind": "warning", "step": 3, "time": 0.0, "message": words}
    (run / "events.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (sample, data, warning)) + "torn"
    )
    monkeypatch.setenv("MY_API_KEY", SECRETS[3])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNFREEZE_PW", "short7x")
    monkeypatch.setenv("TORCH_HOME", "/data/O'Brien, Patient (x)!/torch:/srv/Acme & Co (secret)/y")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "10.1.2.3 jane@host17")
    assert cli.main(["doctor", str(run), "--bundle"]) == 0
    text = (own_cache_here / "unfreeze-bundle.txt").read_text()
    for secret in (
        *SECRETS,
        "PRIVATE",
        "/home/ada",
        "Users",
        "/ada",
        "bucket-of-mine",
        "short7x",
        "O'Brien",
        "Acme",
        "10.1.2.3",
        "host17",
        "host.org",
        "déjà",
        "pw12345678",
        str(own_cache_here),
        "~/models",
    ):
        assert secret not in text, text
    assert '"steps": 7' in text and "NCCL_DEBUG=INFO" in text and '"rows": 3' in text and "…/x.json" in text
    assert "file.json" in text and "https://…" in text
    assert cli.main(["doctor", str(own_cache_here), "--bundle"]) == 2


def test_a_bundle_that_cannot_be_written_is_one_line(own_cache_here, monkeypatch, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("unfreeze.checkpoint.save.write_file", full)
    assert cli.main(["doctor", "--bundle"]) == 2
    said = capsys.readouterr().err
    assert "unfreeze-bundle.txt cannot be written" in said and "in a folder that can be written" in said


def test_a_card_that_auto_passes_over_is_named_in_doctor_plan_and_chat(sandbox, monkeypatch, capsys):
    """It would be slow on the CPU, and nobody would say why."""
    old = cards.Card("Tesla V100", (7, 0), 16 << 30, "535.1", "CUDA 12.6")
    monkeypatch.setattr(cards, "here", lambda: old)
    model = str(sandbox.checkpoint("llama"))
    line = next(f for f in findings_of(Config(model=model)) if f.level == "warn" and "V100" in f.line)
    assert line.line.startswith("the run would be on the CPU: Tesla V100 has compute capability 7.0")
    load_shown(model, "float32", "auto", Common())
    assert "warning: on the CPU: Tesla V100" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["plan", model]) == 0
    assert "V100" not in capsys.readouterr().out


def test_the_experts_of_a_cpu_have_their_own_rows():
    assert [op.name for op in gpu.chosen(("expert_mlp",))] == ["packed_experts", "expert_mlp"]
    assert [op.name for op in gpu.chosen(("rms_norm",))] == ["rms_norm"]
    assert any(
        cell.op.name == "packed_experts" for cell in checked.cells_of(gpu.chosen(), torch.device("cpu"))
    )
