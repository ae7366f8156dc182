"""unfreeze COMMAND …: parse, dispatch, print a UserError without a traceback.

`unfreeze --help` imports no torch. Exit codes:
    0    done; also a training run stopped by Ctrl-C after a step: it is saved, and its result has
         "finished": false
    1    a fault of the program or machine, such as a lost process
    2    an error that the user can fix
    130  interrupted by Ctrl-C anywhere else
"""

from __future__ import annotations

import importlib
import io
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from unfreeze.config.mended import line, with_arguments
from unfreeze.config.synonyms import Hint, command_hint
from unfreeze.core.command import Common
from unfreeze.core.cpu import cpu_class
from unfreeze.core.errors import (
    ConfigError,
    DataError,
    DoesNotFit,
    ProcessGone,
    UserError,
    near_word,
    nearest,
    printable,
    ran_out,
)
from unfreeze.core.garbage import put_off, take_up
from unfreeze.core.process import command_begins
from unfreeze.core.torchrun import started


class Command(NamedTuple):
    """A command. `module` has `main(arguments: list[str], common: Common) -> dict`, the result for --json."""

    module: str
    usage: str
    summary: str


TRAIN = {
    "demo": Command("unfreeze.commands.demo", "demo", "teach the built-in model to talk like Yoda"),
    "sft": Command("unfreeze.recipes.sft", "sft --model M --data F", "fine-tune on conversations"),
    "distill": Command(
        "unfreeze.recipes.distill", "distill --teacher T …", "learn another model's probabilities"
    ),
    "grpo": Command("unfreeze.recipes.grpo", "grpo --reward my.py", "learn from rewards of own answers"),
    "prefer": Command("unfreeze.recipes.prefer", "prefer --data PAIRS", "learn which answers are better"),
    "pretrain": Command("unfreeze.recipes.pretrain", "pretrain run.toml", "train every weight on text"),
}
LOOK = {
    "chat": Command("unfreeze.commands.chat", "chat MODEL_OR_RUN", "talk with a checkpoint or a run"),
    "generate": Command(
        "unfreeze.commands.generate", "generate MODEL_OR_RUN", "continue a text, answer a question"
    ),
    "lab": Command("unfreeze.commands.lab", "lab study.toml", "arms × seeds, an answer with intervals"),
    "report": Command("unfreeze.commands.report", "report RUN", "HTML report and summary of a run"),
    "compare": Command("unfreeze.commands.compare", "compare RUN RUN …", "several runs side by side"),
    "reward": Command(
        "unfreeze.commands.reward", "reward show my.py", "answers with their rewards, before training"
    ),
    "init": Command("unfreeze.commands.init", "init MODEL DATA", "write a run.toml, with reasons"),
    "inspect": Command(
        "unfreeze.commands.inspect", "inspect MODEL", "layers, formats, bytes of a checkpoint"
    ),
    "plan": Command("unfreeze.commands.plan", "plan --model M", "memory, time and cost on any machine"),
    "doctor": Command("unfreeze.commands.doctor", "doctor MODEL --data F", "check files and machine first"),
}
SHIP = {
    "serve": Command("unfreeze.commands.serve", "serve MODEL_OR_RUN …", "answer OpenAI's clients"),
    "export": Command(
        "unfreeze.commands.export", "export RUN --for vllm", "a run's adapter for other programs"
    ),
    "merge": Command("unfreeze.commands.merge", "merge RUN --to bf16", "base and adapter as one checkpoint"),
}
MAKE = {
    "tokenizer": Command(
        "unfreeze.commands.tokenizer", "tokenizer train | show", "make a tokenizer, see its tokens"
    ),
    "data": Command(
        "unfreeze.commands.data", "data clean | show", "filter texts; see rows as the model will"
    ),
    "synth": Command("unfreeze.commands.synth", "synth plan | run", "rows from a server, within a budget"),
    "upcycle": Command("unfreeze.commands.upcycle", "upcycle MODEL", "a dense model becomes experts"),
    "quantize": Command(
        "unfreeze.commands.quantize", "quantize MODEL --to int4", "a bf16 model in 4 or 8 bits"
    ),
    "swap": Command(
        "unfreeze.commands.swap", "swap MODEL PLACE PART", "another attention in a trained model"
    ),
    "advise": Command("unfreeze.commands.advise", "advise --params N", "rate and batch of pretraining"),
    "eval": Command(
        "unfreeze.commands.eval", "eval RUN --tasks rows:F", "scores before and after, with intervals"
    ),
    "life": Command("unfreeze.commands.life", "life small.toml", "tokenizer to rewards, every stage scored"),
}
DEV = {
    "bench": Command(
        "unfreeze.commands.bench", "bench NAME", "compare with other libraries, from a clone: moe dense …"
    ),
    "kernels": Command(
        "unfreeze.commands.kernels", "kernels measure | list", "list or time the implementations of each op"
    ),
    "bisect": Command(
        "unfreeze.commands.bisect",
        "bisect MODEL --against hf",
        "find the first module that differs from transformers",
    ),
    "drill": Command("unfreeze.drill", "drill", "plant every known fault and show how it is reported"),
}
HEADINGS = {"Train": TRAIN, "Make": MAKE, "Look": LOOK, "Ship": SHIP}
COMMANDS = {**TRAIN, **MAKE, **LOOK, **SHIP, **DEV}
SWEPT = ("sft", "distill", "prefer", "grpo", "pretrain")  # commands with `--sweep FIELD=A,B`
PLACEHOLDERS = "--model MODEL"  # in the command of a remedy: the user's own arguments go there
FLAGS = {"--json": "json", "--quiet": "quiet", "--traceback": "traceback", "--plan": "plan"}


def usage() -> str:
    """Text of `unfreeze --help`: at most 34 lines of 80 columns."""
    lines = ["unfreeze trains open-weight language models in the format they came in."]
    for heading, commands in HEADINGS.items():
        lines += ["", heading, *_listed(commands, "unfreeze")]
    return "\n".join([*lines, f"Flags: unfreeze COMMAND --help   unfreeze dev: {', '.join(DEV)}"])


def _listed(commands: Mapping[str, Command], prefix: str) -> list[str]:
    return [f"  {prefix} {command.usage:<23} {command.summary}" for command in commands.values()]


def dev_usage() -> str:
    """Text of `unfreeze dev`."""
    rows = [f"  unfreeze dev {command.usage:<26} {command.summary}" for command in DEV.values()]
    return "\n".join(["For developers of unfreeze:", "", *rows])


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    command_begins()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    common = Common(**{field: flag in arguments for flag, field in FLAGS.items()})
    if process():  # under torchrun only the first process prints; each prints its errors
        common = common._replace(json=False, quiet=True)
    arguments = [argument for argument in arguments if argument not in FLAGS]
    speak_here()
    put_off()
    try:
        return _guarded(lambda: _dispatch(arguments[0] if arguments else "", arguments[1:], common), common)
    finally:
        take_up()


def speak_here() -> None:
    """Print characters that stdout cannot encode as "?", such as arrows on Windows or in a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def process() -> int:
    """Rank of this process under torchrun; 0 without torchrun."""
    with suppress(ConfigError):  # reported when a run starts; --help still works
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
        from unfreeze.commands.version import line as shown
        from unfreeze.commands.version import version

        known = version()
        print(json.dumps(known) if common.json else shown(known), flush=True)
        return 0
    if name not in COMMANDS:
        hint = command_hint(name, COMMANDS)
        remedy = with_arguments(hint, arguments, SWEPT, near_word(name, COMMANDS))
        if name in ("resume", "continue") and arguments:
            remedy = _began(arguments[0]) or remedy
        raise ConfigError(f"there is no command {name!r}{hint.text}", next=remedy)
    cpu_class()  # refuses a class that this machine cannot run
    result: dict[str, Any]
    try:
        if name in SWEPT and "--sweep" in {argument.partition("=")[0] for argument in arguments}:
            result = importlib.import_module("unfreeze.commands.sweep").sweep(name, arguments, common)
        else:
            result = importlib.import_module(COMMANDS[name].module).main(arguments, common)
    except DataError as error:  # rows for another training
        other = name in SWEPT and PLACEHOLDERS in error.next
        mended = _of_the_other(error.next, arguments) if other else _instead(name, arguments, error)
        error.next = printable(mended)
        raise
    except UserError as error:
        error.next = printable(_instead(name, arguments, error))
        raise
    if common.json:
        print(json.dumps(result), flush=True)
    return int(result.get("exit_code", 0))


def _began(run: str) -> str:
    """The command that began a run and resumes it; "" if this is no run's folder."""
    from unfreeze.report.run import read_run
    from unfreeze.report.verdict import rerun_command

    words: list[str] = []
    with suppress(UserError):
        words = shlex.split(rerun_command(read_run(run), Path.cwd()))
    return shlex.join([*words[:-1], run]) if words else ""  # the last is another folder for --out


def _instead(name: str, arguments: list[str], error: UserError) -> str:
    """The user's own line with the name that was meant, if the error knows it."""
    wrong, right = error.instead
    if not right or wrong not in arguments:
        return error.next
    return line(name, [right if word == wrong else word for word in arguments])


def _of_the_other(command: str, arguments: list[str]) -> str:
    """The command of another training, with those of the user's arguments that it takes."""
    from unfreeze.config.names import name_of, spellings
    from unfreeze.config.recipes import CONFIGS

    known, kept, keeps = spellings(config := CONFIGS[command.split()[1]]), list[str](), True
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0].removeprefix("--").removeprefix("no-")
            keeps = name_of(config, flag) in known and flag != "columns"
        if keeps:
            kept.append(word)
    return with_arguments(Hint("", command), kept, SWEPT, "")


def _guarded(run: Callable[[], int], common: Common) -> int:
    """Run, and turn errors into one line on stderr; with --traceback show the traceback."""
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
        print(f"interrupted: {str(interrupt) or 'run the same command again'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # our output pipe was closed (… | head)
        return 0
    except Exception as error:
        if common.traceback:
            traceback.print_exc()
        elif what := ran_out(error):
            remedy = "end other programs, raise ulimit -v, or use a smaller model"
            print(f"DoesNotFit: memory ran out: {what}\n  next: {remedy}", file=sys.stderr)
            return DoesNotFit.exit_code
        else:
            at = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"fault: {type(error).__name__}: {error}  (at {at.name}, {at.filename}:{at.lineno})"
            print(f"{fault}\n  next: run the same command with --traceback and report it", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
