"""unfreeze COMMAND …: parse, dispatch, print a UserError without a traceback.

`unfreeze --help` imports no torch. Exit codes:
    0    done; also a training run that Ctrl-C ended after a step: it is saved, its result says
         "finished": false
    1    a fault of the program or machine, such as a process that others wait for and that is gone
    2    something the user can mend
    130  interrupted by Ctrl-C anywhere else
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from unfreeze.config.synonyms import command_hint
from unfreeze.core.command import Common
from unfreeze.core.cpu import cpu_class
from unfreeze.core.errors import ConfigError, DoesNotFit, ProcessGone, UserError, nearest, ran_out
from unfreeze.core.garbage import put_off, take_up
from unfreeze.core.process import command_begins
from unfreeze.core.torchrun import started


class Command(NamedTuple):
    """`module` has `main(arguments: list[str], common: Common) -> dict`, the result that --json prints."""

    module: str
    usage: str
    summary: str


TRAIN = {
    "demo": Command("unfreeze.commands.demo", "demo", "teach the built-in model to talk like Yoda"),
    "sft": Command("unfreeze.recipes.sft", "sft --model M --data F", "fine-tune on conversations"),
    "distill": Command(
        "unfreeze.recipes.distill", "distill --teacher T …", "learn another model's probabilities"
    ),
    "prefer": Command("unfreeze.recipes.prefer", "prefer --data PAIRS", "learn which answers are better"),
    "pretrain": Command("unfreeze.recipes.pretrain", "pretrain run.toml", "train every weight on text"),
}
LOOK = {
    "chat": Command("unfreeze.commands.chat", "chat MODEL_OR_RUN", "talk with a checkpoint or a run"),
    "generate": Command("unfreeze.commands.generate", "generate MODEL_OR_RUN", "continue a text"),
    "report": Command("unfreeze.commands.report", "report RUN", "the page of a run, and a summary"),
    "compare": Command("unfreeze.commands.compare", "compare RUN RUN …", "several runs side by side"),
    "data": Command(
        "unfreeze.commands.data_show", "data show F --model M", "what of the data will be taught"
    ),
    "init": Command("unfreeze.commands.init", "init MODEL DATA", "write a run.toml for them, with reasons"),
    "inspect": Command("unfreeze.commands.inspect", "inspect MODEL", "what is in a checkpoint"),
    "plan": Command("unfreeze.commands.plan", "plan --model M", "what a run takes and costs, anywhere"),
    "doctor": Command("unfreeze.commands.doctor", "doctor MODEL --data F", "look for faults before training"),
}
SHIP = {
    "export": Command(
        "unfreeze.commands.export", "export RUN --for vllm", "a run's adapter for other programs"
    ),
    "merge": Command("unfreeze.commands.merge", "merge RUN --to bf16", "base and adapter as one checkpoint"),
}
DEV = {
    "bench": Command(
        "unfreeze.commands.bench", "bench WHAT", "measure beside peers, from a clone: moe dense load decode …"
    ),
    "kernels": Command(
        "unfreeze.commands.kernels", "kernels measure | list", "which implementation of each op runs here"
    ),
    "bisect": Command(
        "unfreeze.commands.bisect",
        "bisect MODEL --against hf",
        "the first module that differs from transformers",
    ),
    "drill": Command("unfreeze.drill", "drill", "plant every known fault and show the line that names it"),
}
HEADINGS = {"Train": TRAIN, "Look": LOOK, "Ship": SHIP}
COMMANDS = {**TRAIN, **LOOK, **SHIP, **DEV}
SWEPT = ("sft", "distill", "prefer", "pretrain")  # of which `--sweep FIELD=A,B` makes several runs
FLAGS = {"--json": "json", "--quiet": "quiet", "--traceback": "traceback", "--plan": "plan"}


def usage() -> str:
    """The text of `unfreeze --help`: at most 24 lines of 80 columns."""
    lines = ["unfreeze trains open-weight language models in the format they came in."]
    for heading, commands in HEADINGS.items():
        lines += ["", heading, *_listed(commands, "unfreeze")]
    return "\n".join([*lines, f"unfreeze COMMAND --help: its flags   unfreeze dev: {', '.join(DEV)}"])


def _listed(commands: Mapping[str, Command], prefix: str) -> list[str]:
    return [f"  {prefix} {command.usage:<23} {command.summary}" for command in commands.values()]


def dev_usage() -> str:
    """The text of `unfreeze dev`."""
    rows = [f"  unfreeze dev {command.usage:<26} {command.summary}" for command in DEV.values()]
    return "\n".join(["For those who work on unfreeze itself:", "", *rows])


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    command_begins()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    common = Common(**{field: flag in arguments for flag, field in FLAGS.items()})
    if process():  # under torchrun the first process speaks for all; errors are said by each
        common = common._replace(json=False, quiet=True)
    arguments = [argument for argument in arguments if argument not in FLAGS]
    speak_here()
    put_off()
    try:
        return _guarded(lambda: _dispatch(arguments[0] if arguments else "", arguments[1:], common), common)
    finally:
        take_up()


def speak_here() -> None:
    """What a terminal has no sign for is shown as "?": one of Windows, or a pipe, may know no arrow."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def process() -> int:
    """Which of torchrun's processes this is; 0 without torchrun."""
    with suppress(ConfigError):  # said where a run starts; --help answers
        return started().rank
    return 0


def _dispatch(name: str, arguments: list[str], common: Common) -> int:
    if name in ("", "-h", "--help", "help"):
        print(usage(), flush=True)
        return 0 if name else 2
    if name == "dev":
        if not arguments or arguments[0] in ("-h", "--help"):
            print(dev_usage(), flush=True)
            return 0
        if arguments[0] not in DEV:
            raise ConfigError(
                f"there is no command 'dev {arguments[0]}'{nearest(arguments[0], DEV)}", next="unfreeze dev"
            )
        name, arguments = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        from unfreeze.commands.version import line, version

        known = version()
        print(json.dumps(known) if common.json else line(known), flush=True)
        return 0
    if name not in COMMANDS:
        hint = command_hint(name, COMMANDS)
        raise ConfigError(f"there is no command {name!r}{hint.text}", next=hint.next)
    cpu_class()  # a class that this machine can't be is refused here
    result: dict[str, Any]
    if name in SWEPT and "--sweep" in {argument.partition("=")[0] for argument in arguments}:
        result = importlib.import_module("unfreeze.commands.sweep").sweep(name, arguments, common)
    else:
        result = importlib.import_module(COMMANDS[name].module).main(arguments, common)
    if common.json:
        print(json.dumps(result), flush=True)
    return int(result.get("exit_code", 0))


def _guarded(run: Callable[[], int], common: Common) -> int:
    """Errors end in one clear line on stderr; the traceback only if it was asked for."""
    try:
        return run()
    except UserError as error:
        if common.traceback:
            traceback.print_exc()
        elif not (isinstance(error, ProcessGone) and error.silent):
            speaker = f"process {process()}: " if process() > 0 else ""
            print(f"{speaker}{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {str(interrupt) or 'give the same command again'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone (… | head); nothing is left to say
        return 0
    except Exception as error:
        if common.traceback:
            traceback.print_exc()
        elif what := ran_out(error):
            remedy = "end other programs, raise ulimit -v, or take a smaller model"
            print(f"DoesNotFit: memory ran out: {what}\n  next: {remedy}", file=sys.stderr)
            return DoesNotFit.exit_code
        else:
            at = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"fault: {type(error).__name__}: {error}  (at {at.name}, {at.filename}:{at.lineno})"
            print(f"{fault}\n  next: run the same command with --traceback and report it", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
