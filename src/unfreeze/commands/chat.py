"""unfreeze chat MODEL_OR_RUN: talk with a checkpoint or a run in the terminal.

/help lists the commands; exit or Ctrl-D leaves.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TextIO

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.adapter import adapter_folder
from unfreeze.config.device import Device
from unfreeze.config.parse import Files, Frozen, ModelName, parse, refuse_second
from unfreeze.core.command import Common
from unfreeze.core.draws import SEEDS
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.units import plural
from unfreeze.job.merge_aware import refuse_beside
from unfreeze.job.opening.device import load_shown

if TYPE_CHECKING:
    from unfreeze.generate.model import Model
    from unfreeze.generate.switch import Switch


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL_OR_RUN")] = Field(
        description="checkpoint or run folder, adapter folder, or Hugging Face id"
    )
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, if the one it names is not on this machine"
    )
    adapters: Files = Field(
        default=(), description="more runs or adapters of the same base; /use NAME switches between them"
    )
    system: str = Field(default="", description="system prompt; empty: none")
    max_new_tokens: int = Field(default=400, ge=1, description="most tokens in one answer")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="keep the likeliest tokens whose probabilities sum to p"
    )
    seed: int = Field(default=0, ge=SEEDS[0], le=SEEDS[1], description="seed of the sampling")
    speed: bool = Field(default=False, description="after each answer, its tokens per second")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype. auto: bfloat16 where the hardware has bf16 matmul units"
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Read lines until the input ends: run a command or stream an answer. Returns the conversation."""
    asks = "type it at the prompt, or: unfreeze generate RUN --mode chat --prompt …"
    refuse_second(arguments, "chat takes no question as an argument", asks)
    if "--prompt" in {word.partition("=")[0] for word in arguments}:
        once = shlex.join(["unfreeze", "generate", *arguments, "--mode", "chat"])
        raise ConfigError("chat has no flag --prompt; generate answers one question", next=once)
    config = parse(Config, arguments, command="chat", description=__doc__ or "", positional=True)
    more = [(model_name(source), adapter_folder(source)) for source in config.adapters]
    refuse_rounded(config)
    model = load_shown(config.model, config.dtype, config.device, common, config.base)
    settings = config.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "seed"})
    from unfreeze.generate.switch import Switch

    switch = Switch(model.decoder, model_name(config.model))
    first = switch.now
    for name, folder in more:
        switch.load(name, folder)
    switch.use(first)
    out = sys.stderr if common.json else sys.stdout
    # rounding an unpacked base changes layers without an adapter too: there is no base to switch to
    packed = model.manifest is None or model.manifest.is_packed()
    own = None if model.decoder.while_looking and not packed else switch
    talk = Dialogue(model, settings, out, common.quiet, own, config.speed)
    talk.set_system(config.system)
    if sys.stdin.isatty():
        talk.warming = warming(model)
    if sys.stdin.isatty() and not common.quiet:
        print(f"{config.model}. /help lists the commands, Ctrl-C stops an answer.", file=talk.out)
    while (line := _read(talk.out)) is not None and line not in LEAVE:
        if line.startswith("/"):
            print(obey(talk, line), file=sys.stderr)
        elif line:
            talk.ask(line)
    leave(talk)
    return {"messages": talk.messages}


def refuse_rounded(config: Config) -> None:
    """Raise ConfigError for a run that was trained through a merge's rounding, beside other adapters."""
    if not config.adapters:
        return
    from unfreeze.generate.source import locate_model

    own = locate_model(config.model, config.base).adapter
    for name, adapter in ((config.model, own), *((name, adapter_folder(name)) for name in config.adapters)):
        if adapter is not None:
            refuse_beside(adapter, name)


def warming(model: Model) -> Thread:
    """Return a running thread that warms the model up while the user types.

    The first answer waits for it. If it fails, that answer meets the same fault and says so.
    """

    def warm_up() -> None:
        with suppress(Exception):
            model.warm_up()

    thread = Thread(target=warm_up)
    thread.start()
    return thread


def leave(talk: Dialogue) -> None:
    """Wait for a model that is still warming up: a thread that compiles cannot be ended.

    Compiling takes some 20 s, once on a machine. Ctrl-C ends the process at once.
    """
    try:
        talk.wait("Ctrl-C leaves now")
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)


def model_name(source: str) -> str:
    """Return an adapter's name: that of its run's folder, or its own folder."""
    path = Path(source).resolve()
    return path.parent.name if path.name == "adapter" else path.name


def _read(talk: TextIO) -> str | None:
    """The next line, or None at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=talk, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    return line.strip() if line else None


PATIENCE = 1.0  # seconds until it is said what the chat waits for
CUT = {
    "length": "--max-new-tokens allows no more",
    "window": "the model has no position left; /reset forgets the conversation",
}
"""Why an answer was cut, by its stop reason."""


@dataclass
class Speed:
    """Times of an answer in seconds: of the question, and of each token."""

    begin: float
    tokens: list[float] = field(default_factory=list)

    def words(self) -> str:
        """Return such words as '24 tokens, the first after 0.08 s, then 310.2 tokens/s'."""
        if not self.tokens:
            return "no tokens"
        first, last, count = self.tokens[0], self.tokens[-1], len(self.tokens)
        then = f", then {(count - 1) / (last - first):,.1f} tokens/s" if last > first else ""
        return f"{plural(count, 'token')}, the first after {first - self.begin:.2f} s{then}"


@dataclass
class Dialogue:
    """A conversation and the model that answers. The system prompt, if any, is the first message.

    out          where answers are printed as they are generated
    shows_speed  True: after each answer a line with its speed
    speed        of the last answer
    warming      ends when the model can answer without delay; None: it is not waited for
    """

    model: Model
    settings: dict[str, Any]
    out: TextIO
    quiet: bool = False
    switch: Switch | None = None
    shows_speed: bool = False
    speed: Speed | None = None
    warming: Thread | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages without the system prompt."""
        return [message for message in self.messages if message["role"] != "system"]

    def set_system(self, text: str) -> None:
        """Replace the system prompt from here on; "" for none."""
        system = [{"role": "system", "content": text}] if text else []
        self.messages = [*system, *self.turns]

    def reset(self) -> None:
        """Forget the turns; the system prompt stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def wait(self, way_out: str = "Ctrl-C stops the answer") -> None:
        """Wait until the model is warm: one pass at a time. Say it if that takes longer than PATIENCE."""
        if self.warming is None:
            return
        self.warming.join(PATIENCE)
        if self.warming.is_alive():
            print(f"(kernels are being compiled, once on this machine; {way_out})", file=sys.stderr)
            self.warming.join()

    def ask(self, question: str) -> None:
        """Add a question, then answer it."""
        self.messages.append({"role": "user", "content": question})
        self.answer()

    def answer(self) -> None:
        """Print the answer as it is generated and remember it, or the part of it before Ctrl-C.

        If the conversation has grown too long, print an error to stderr and continue the chat.
        """
        answer, last, self.speed = "", None, Speed(time.perf_counter())
        try:
            self.wait()
            for last in self.model.stream_chat_pieces(self.messages, **self.settings):
                self.speed.tokens.append(time.perf_counter())
                answer += last.text
                print(last.text, end="", file=self.out, flush=True)
        except KeyboardInterrupt:
            pass
        except UserError as error:
            print(f"{error}\n(/reset forgets the conversation)", file=sys.stderr)
        print(file=self.out, flush=True)
        if last is not None and last.finish_reason == "length" and not self.quiet:
            print(f"(the answer stops here: {CUT[last.stop_reason or 'length']})", file=sys.stderr)
        if self.shows_speed:
            print(f"({self.speed.words()})", file=sys.stderr)
        self.messages.append({"role": "assistant", "content": answer})


# Each command takes the conversation and the text after its name, and returns a line to print.


def _help(talk: Dialogue, text: str) -> str:
    rows = [(f"{name} {command.argument}", command.does) for name, command in COMMANDS.items()]
    lines = [f"  {usage:<15} {does}" for usage, does in [*rows, ("/exit", "leave; so does Ctrl-D")]]
    return "\n".join([*lines, *([f"  {_adapters(talk.switch)}"] if talk.switch else [])])


def _adapters(switch: Switch) -> str:
    """ "adapters: mine (now), base"."""
    return "adapters: " + ", ".join(f"{name} (now)" if name == switch.now else name for name in switch.names)


def _use(talk: Dialogue, text: str) -> str:
    if talk.switch is None:
        return "there are no adapters here"
    if not text:
        return f"({_adapters(talk.switch)})"
    talk.wait()
    try:
        talk.switch.use(text)
    except UserError as error:
        return str(error)
    return f"({_adapters(talk.switch)}; the conversation continues, /reset forgets it)"


def _reset(talk: Dialogue, text: str) -> str:
    talk.reset()
    return "(forgotten)"


def _system(talk: Dialogue, text: str) -> str:
    talk.set_system(text)
    return "(system prompt set)" if text else "(no system prompt)"


def _regenerate(talk: Dialogue, text: str) -> str:
    if not talk.turns:
        return "(no question yet)"
    talk.messages.pop()
    # the same seed would draw the same tokens
    talk.settings["seed"] += 1
    talk.answer()
    greedy = "(greedy answers do not change; to sample: unfreeze chat … --temperature 0.8)"
    return greedy if talk.settings["temperature"] == 0 else "(answered again)"


def _speed(talk: Dialogue, text: str) -> str:
    talk.shows_speed = not talk.shows_speed
    last = f"{talk.speed.words()}; " if talk.speed else ""
    return (
        f"({last}{'shown after each answer' if talk.shows_speed else 'no longer shown'}, /speed changes it)"
    )


def _save(talk: Dialogue, text: str) -> str:
    """Write the conversation as a line of chat data. An existing file is not overwritten."""
    row = json.dumps({"messages": talk.messages}) + "\n"
    try:
        with open(os.path.expanduser(text), "x", encoding="utf-8") as file:
            file.write(row)
    except FileExistsError:
        return f"{text} exists and was not overwritten; /save under another name"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"{text} was not written: {getattr(error, 'strerror', None) or error}"
    return f"(saved: {text}, one line of `unfreeze sft --data`)"


class ChatCommand(NamedTuple):
    """argument: usage text after the name; "" if there is none, in brackets if it is optional."""

    argument: str
    does: str
    run: Callable[[Dialogue, str], str]


COMMANDS = {
    "/help": ChatCommand("", "this list", _help),
    "/reset": ChatCommand("", "forget the conversation; the system prompt stays", _reset),
    "/system": ChatCommand("[TEXT]", "set the system prompt from here on; without TEXT remove it", _system),
    "/regenerate": ChatCommand("", "answer the last question again", _regenerate),
    "/use": ChatCommand(
        "[NAME]", "answer with this adapter (or base) from here on; without NAME list the adapters", _use
    ),
    "/speed": ChatCommand("", "tokens per second of the last answer, and from here on of each", _speed),
    "/save": ChatCommand("FILE", "write the conversation as a row of data for `unfreeze sft`", _save),
}
LEAVE = ("/exit", "/quit", "exit")


def obey(talk: Dialogue, line: str) -> str:
    """Run the command in a line "/NAME TEXT". -> the line to print.

    An unknown command returns the list of commands; the model doesn't see it.
    """
    name, _, text = line.partition(" ")
    if name not in COMMANDS:
        return f"there is no command {name}. Commands:\n{_help(talk, '')}"
    argument = COMMANDS[name].argument
    if bool(text) != bool(argument) and not argument.startswith("["):
        return f"usage: {name} {argument}".rstrip()
    return COMMANDS[name].run(talk, text.strip())
