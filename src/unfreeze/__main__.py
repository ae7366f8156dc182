"""Start the command line: `unfreeze`, `python -m unfreeze`, or under torchrun `-m unfreeze sft …`.

Nothing is imported before a Ctrl-C is looked for: the first tenth of a second is imports, and ends like the
rest.
"""

import signal
import sys


def main() -> int:
    """The exit code of the command line; 130 where Ctrl-C comes before it is there."""
    try:
        from unfreeze import cli

        code = cli.main()
        # all is done: a Ctrl-C while the interpreter tears down changes nothing
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        print("interrupted: give the same command again", file=sys.stderr)
        return 130
    finally:
        # Python ends a -m process by the signal itself if Ctrl-C left an exec of text, as in the making of a
        # dataclass, even if it was caught later. The next exec forgets that: the exit code is 130 everywhere.
        exec("")


if __name__ == "__main__":
    sys.exit(main())
