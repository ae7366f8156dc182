"""Stop strings in a stream of text pieces: found across piece boundaries, never emitted."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on until a stop string is complete; holds back text that may still become one.

    The output is the text before the stop string that is complete first (of two ending at the same character,
    the longer), however the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece; return (text that is safe to show, True if a stop string was found).

        After one was found, nothing may be pushed.
        """
        if not self.stops:
            return piece, False
        text = self.held + piece
        ends = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if ends:
            self.held = ""
            return text[: min(ends)[1]], True
        keep = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return text that was held back but, as the text ends here, is not a stop string."""
        held, self.held = self.held, ""
        return held
