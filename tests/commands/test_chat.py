"""`unfreeze chat` through a pipe: a conversation, and the lines that are commands."""

import io
import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli
from unfreeze.commands import chat
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate.answer import Piece


class Echo:
    """Stands for a model: it answers with the number of messages and the seed, and notes what it was sent."""

    def __init__(self):
        self.sent, self.decoder, self.manifest = [], torch.nn.Module(), None
        self.decoder.while_looking = []

    def stream_chat_pieces(self, messages, *, seed, **settings):
        self.sent.append([message["content"] for message in messages])
        yield Piece(0, 0, f"{len(messages)} messages, seed {seed}", None)


@pytest.fixture
def say(monkeypatch):
    """say(lines, *flags) -> (exit code, the stand-in model)."""

    def said(lines, *flags):
        echo = Echo()
        monkeypatch.setattr(chat, "load_shown", lambda *_: echo)
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        return cli.main(["chat", "anything", *flags]), echo

    return said


def test_chat_reads_a_pipe_and_remembers_until_reset(monkeypatch, unfreeze_json):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("What is the capital of France?\n\n/reset\nHello.\nWho are you?\n")
    )
    result = unfreeze_json("chat", TINY_K2, "--max-new-tokens", 24, "--system", "Be plain.")
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]  # the first question was forgotten
    before = result["messages"][:4]
    assert result["messages"][4]["content"] == unfreeze.load(TINY_K2).chat(before, max_new_tokens=24)


def test_chat_streams_to_stdout_and_says_why_an_answer_ended(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    assert cli.main(["chat", str(TINY_K2), "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert (
        said.out.strip()
        == unfreeze.load(TINY_K2).chat("What is the capital of France?", max_new_tokens=2).strip()
    )
    assert "(the answer stops here: --max-new-tokens allows no more)" in said.err


def test_a_full_window_is_another_reason(monkeypatch, say, capsys):
    def full(self, messages, **settings):
        yield Piece(0, 0, "And so", "window")

    monkeypatch.setattr(Echo, "stream_chat_pieces", full)
    say(["Hello."])
    assert "the model has no position left; /reset forgets the conversation" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_while_the_user_types_the_model_warms_up_and_the_first_answer_waits_for_it(
    monkeypatch, capsys, fails
):
    done = []

    class Slow(Echo):
        def warm_up(self):
            time.sleep(0.2)
            done.append("warm")
            if fails:
                raise RuntimeError("no kernel")

        def stream_chat_pieces(self, messages, **settings):
            done.append("asked")
            yield from super().stream_chat_pieces(messages, **settings)

    monkeypatch.setattr(chat, "load_shown", lambda *_: Slow())
    monkeypatch.setattr("sys.stdin", Terminal("Hello.\n"))
    assert cli.main(["chat", "anything"]) == 0 and done == ["warm", "asked"]
    said = capsys.readouterr()
    assert "1 messages, seed 0" in said.out and "no kernel" not in said.err


class Compiling:
    """A thread that compiles until its second join."""

    def __init__(self, error=None):
        self.joins, self.error = [], error

    def join(self, timeout=None):
        self.joins.append(timeout)
        if self.error and timeout is None:
            raise self.error

    def is_alive(self):
        return self.joins[-1] is not None


def test_leaving_waits_for_kernels_that_are_being_compiled_and_ctrl_c_does_not(monkeypatch, capsys):
    threads, codes = [Compiling(), Compiling(KeyboardInterrupt())], []
    monkeypatch.setattr("os._exit", codes.append)
    for thread in threads:
        talk = chat.Dialogue(Echo(), {}, io.StringIO())
        talk.warming = thread
        chat.leave(talk)
    assert [thread.joins for thread in threads] == [[chat.PATIENCE, None]] * 2 and codes == [130]
    assert capsys.readouterr().err.count("compiled, once on this machine; Ctrl-C leaves now") == 2
    chat.leave(chat.Dialogue(Echo(), {}, io.StringIO()))
    assert capsys.readouterr().err == ""


def test_the_first_answer_says_what_it_waits_for(capsys):
    talk = chat.Dialogue(Echo(), {"seed": 0}, io.StringIO())
    talk.warming = Compiling()
    talk.ask("Hello.")
    assert "kernels are being compiled, once on this machine; Ctrl-C stops" in capsys.readouterr().err
    assert talk.messages[-1]["role"] == "assistant" and talk.messages[-1]["content"]


def test_a_warm_model_chooses_no_kernel_for_a_step(monkeypatch):
    """Control arm: a model that is not warm does."""
    from unfreeze.kernels.choice import choose

    counts = []
    for warm in (False, True):
        monkeypatch.setattr(choose, "_CHOSEN", {})
        model = unfreeze.load(TINY_K2)
        if warm:
            model.warm_up()
        pieces = model.stream([5], max_new_tokens=3)
        before = len(choose._CHOSEN)
        list(pieces)
        counts.append(len(choose._CHOSEN) - before)
    assert counts[0] > counts[1] == 0


def test_the_speed_is_shown_on_request(monkeypatch, say, capsys):
    """A clock that the stand-in model moves: the first token after 0.25 s, then two in 0.5 s."""
    now = [100.0]

    def slowly(self, messages, **settings):
        for seconds in (0.25, 0.1, 0.4):
            now[0] += seconds
            yield Piece(0, 0, "so ", None)

    monkeypatch.setattr(Echo, "stream_chat_pieces", slowly)
    monkeypatch.setattr(chat, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    line = "3 tokens, the first after 0.25 s, then 4.0 tokens/s"
    say(["Hello.", "/speed", "Go on.", "/speed", "Go on."])
    assert capsys.readouterr().err.splitlines() == [
        f"({line}; shown after each answer, /speed changes it)",
        f"({line})",
        f"({line}; no longer shown, /speed changes it)",
    ]
    say(["Hello."], "--speed")
    assert capsys.readouterr().err == f"({line})\n"


@pytest.mark.parametrize("line", ["/help", "/halp", "/", "/etc/passwd is a file", "/reset now", "/save"])
def test_a_line_that_begins_with_a_slash_never_goes_to_the_model(say, capsys, line):
    code, model = say([line])
    error = capsys.readouterr().err
    assert code == 0 and model.sent == []
    if line in ("/reset now", "/save"):
        assert error.startswith(f"usage: {line.split()[0]}")
    else:
        assert all(name in error for name in (*chat.COMMANDS, "/exit"))
        assert error.startswith(f"there is no command {line.split()[0]}.") == (line != "/help")


@pytest.mark.parametrize("word", ["exit", "/exit", "/quit"])
def test_exit_leaves(say, word):
    assert say(["Hello.", word, "Are you still there?"])[1].sent == [["Hello."]]


def test_system_holds_from_here_on_and_through_a_reset(say):
    lines = ["Hello.", "/system Be brief.", "Go on.", "/reset", "Again.", "/system", "Plain."]
    _, model = say(lines, "--system", "Be kind.")
    sent = [" | ".join(text for text in texts if " messages" not in text) for texts in model.sent]
    assert sent == [
        "Be kind. | Hello.",
        "Be brief. | Hello. | Go on.",
        "Be brief. | Again.",
        "Again. | Plain.",
    ]


def test_regenerate_answers_the_same_question_from_another_seed(say, capsys):
    _, model = say(["/regenerate", "Hello.", "/regenerate", "Go on."], "--temperature", "1")
    said = capsys.readouterr()
    assert model.sent[:2] == [["Hello."]] * 2 and "no question yet" in said.err
    assert said.out.split("\n")[:2] == ["1 messages, seed 0", "1 messages, seed 1"]
    assert model.sent[2] == ["Hello.", "1 messages, seed 1", "Go on."]  # the first answer is forgotten
    say(["Hello.", "/regenerate"])
    assert "--temperature" in capsys.readouterr().err  # greedy: it can say nothing else


def test_what_is_saved_is_a_row_of_data_and_no_file_is_overwritten(say, tmp_path, capsys):
    file = tmp_path / "my talk.jsonl"
    say(["Grüß dich.", f"/save {file}", f"/save {tmp_path}/none/x", "/save a\0b"], "--system", "Be kind.")
    error = capsys.readouterr().err
    (row,) = map(json.loads, file.read_text().splitlines())
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert row["messages"][1]["content"] == "Grüß dich."
    assert "No such file" in error and "null" in error
    file.write_text("years of work")
    say(["Hello.", f"/save {file}"])
    assert file.read_text() == "years of work" and "another name" in capsys.readouterr().err


def test_a_late_system_prompt_is_saved_with_the_conversation(say, tmp_path):
    say(["Hello.", "/system Be brief.", f"/save {tmp_path / 'talk.jsonl'}"])
    (row,) = map(json.loads, (tmp_path / "talk.jsonl").read_text().splitlines())
    assert row["messages"][0] == {"role": "system", "content": "Be brief."}


def test_adapters_are_switched_and_each_answers_as_if_it_were_alone(
    run_dir, monkeypatch, unfreeze_json, capsys, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(run_dir / "adapter", other)
    factors = load_file(other / "adapter_model.safetensors")
    mirrored = {name: -tensor if "lora_B" in name else tensor for name, tensor in factors.items()}
    save_file(mirrored, other / "adapter_model.safetensors", {"layout": "peft"})
    question = "What is the capital of France?"
    names = ["three steps", "other", "base", "three steps"]
    lines = [
        line
        for name in names
        for line in (f"/use {name}", "/reset", question, f"/save {tmp_path}/{name}.jsonl")
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "/use nobody", "/help"]) + "\n"))
    asked = ["--max-new-tokens", 12, "--device", "cpu", "--adapters", other]
    unfreeze_json("chat", run_dir, *asked)

    def saved(name):
        return json.loads((tmp_path / f"{name}.jsonl").read_text())["messages"][-1]["content"]

    alone = {"three steps": run_dir, "other": other, "base": TINY_K2}
    said = {name: unfreeze.load(path).chat(question, max_new_tokens=12) for name, path in alone.items()}
    assert {name: saved(name) for name in alone} == said and len(set(said.values())) == 3


def test_use_names_what_is_there(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/use bas\n/use base\n/use\n/foo\n"))
    assert cli.main(["chat", str(run_dir), "--device", "cpu"]) == 0
    error = capsys.readouterr().err
    assert "there is no 'bas' here; nearest: 'base'" in error
    assert "adapters: base (now), three steps; the conversation continues" in error
    assert "(adapters: base (now), three steps)\n" in error
    assert error.rstrip().endswith("adapters: base (now), three steps") and "  /use [NAME] " in error
