"""unfreeze COMMAND …: parse, dispatch, print a UserError without a traceback. `unfreeze --help` imports no torch.

Exit codes: 0 done (a training run that Ctrl-C ended after a step is saved and counts as done, its result says "finished": false),
1 a fault of the program or machine, 2 something the user can mend, 130 interrupted by Ctrl-C anywhere else.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, UserError, nearest


class Command(NamedTuple):
    """`module` has `main(arguments: list[str], common: Common) -> dict`, the result that --json prints."""

    module: str
    usage: str
    summary: str


COMMANDS = {
    "demo": Command("unfreeze.commands.demo", "demo", "train the built-in tiny-k2 (INT4 experts) to answer like Yoda, and see it"),
    "sft": Command("unfreeze.recipes.sft", "sft run.toml", "fine-tune a checkpoint on conversations, every linear layer, experts included"),
    "pretrain": Command("unfreeze.recipes.pretrain", "pretrain run.toml", "train all weights on text, from nothing or from a checkpoint"),
    "chat": Command("unfreeze.commands.chat", "chat MODEL_OR_RUN", "talk with a checkpoint or a run"),
    "generate": Command("unfreeze.commands.generate", "generate MODEL_OR_RUN --prompt TEXT", "continue a text or answer a prompt"),
    "data": Command("unfreeze.commands.data_show", "data show F --model MODEL", "the data as the model will see it: mask, lengths, what is lost"),
    "inspect": Command("unfreeze.commands.inspect", "inspect MODEL", "what is in a checkpoint; reads no tensor"),
    "export": Command("unfreeze.commands.export", "export RUN --layout peft", "write a run's adapter in another layout, verified"),
    "drill": Command("unfreeze.drill", "drill", "plant every known fault in a sandbox and show the line that names it"),
    "doctor": Command("unfreeze.commands.doctor", "doctor MODEL --data F", "look for those faults in your own files and machine; trains nothing"),
    "bisect": Command("unfreeze.commands.bisect", "bisect MODEL --against hf", "name the first module whose output differs from transformers'"),
    "bench": Command("unfreeze.bench", "bench WHAT", "moe|dense|load|decode|growth|layer|model: measure beside peers, append rows"),
    "kernels": Command("unfreeze.commands.kernels", "kernels measure | list", "which implementation of each op runs here, and measuring it"),
    "report": Command("unfreeze.commands.report", "report RUN", "write report.html of a run and print its summary"),
    "compare": Command("unfreeze.commands.compare", "compare RUN RUN …", "two or more runs side by side: config, curves, results"),
}
FLAGS = {"--json": "json", "--quiet": "quiet", "--traceback": "traceback"}


def usage() -> str:
    """The text of `unfreeze --help`."""
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"  unfreeze {command.usage:<{width}}  {command.summary}" for command in COMMANDS.values()]
    return "\n".join(
        [
            "unfreeze trains open-weight language models, every weight of them, in the format they were published in.",
            "",
            *lines,
            "",
            "  unfreeze COMMAND --help               the flags of a command; each is also a TOML key",
            "",
            "every command takes: --json (result as one JSON object on the last line of stdout)  --quiet  --traceback",
            "exit codes: 0 done, 1 a fault, 2 something you can mend, 130 interrupted before there was anything to save",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    common = Common(**{field: flag in arguments for flag, field in FLAGS.items()})
    if process():  # under torchrun the first process speaks for all; errors are said by each
        common = common._replace(json=False, quiet=True)
    arguments = [argument for argument in arguments if argument not in FLAGS]
    return _guarded(lambda: _dispatch(arguments[0] if arguments else "", arguments[1:], common), common)


def process() -> int:
    """Which of torchrun's processes this is; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def _dispatch(name: str, arguments: list[str], common: Common) -> int:
    if name in ("", "-h", "--help", "help"):
        print(usage(), flush=True)
        return 0 if name else 2
    if name in ("-V", "--version"):
        import unfreeze

        print(unfreeze.__version__)
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}{nearest(name, COMMANDS)}", next="unfreeze --help")
    result: dict[str, Any] = importlib.import_module(COMMANDS[name].module).main(arguments, common)
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
        else:
            print(f"process {process()}: " * (process() > 0) + f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {str(interrupt) or 'give the same command again'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone (… | head); nothing is left to say
        return 0
    except Exception as error:
        if common.traceback:
            traceback.print_exc()
        else:
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"fault: {type(error).__name__}: {error}  (at {place.name}, {place.filename}:{place.lineno})\n"
                "  next: run the same command with --traceback and report it",
                file=sys.stderr,
            )
        return 1


if __name__ == "__main__":
    sys.exit(main())
