"""Ollama's Modelfile for a GGUF: FROM, TEMPLATE, PARAMETER stop.

Ollama's templates are Go's, a checkpoint's are Jinja. A template whose turns are text before and after the
content, by role alone, is derived by rendering single turns and proven by rendering whole conversations. For
any other, TEMPLATE is left out and Ollama uses the file's own if it recognises it.

Source: https://github.com/ollama/ollama/blob/main/docs/modelfile.md and template.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unfreeze.core.errors import UserError

Turn = dict[str, str]
Render = Callable[[Sequence[Turn], bool], str]
"""(turns, True to open the assistant's turn) -> text, without BOS"""
ROLES = ("system", "user", "assistant")
PROBES = ("Zq7", "Yk4")  # cannot be part of a template


@dataclass(frozen=True)
class Form:
    """A chat template as text around each turn.

    around   role -> (before, after)
    opening  text that opens the assistant's turn
    absent   text in place of a system turn that is not there
    """

    around: dict[str, tuple[str, str]]
    opening: str
    absent: str

    def render(self, turns: Sequence[Turn]) -> str:
        """The conversation, with the assistant's turn opened."""
        spoken = any(turn["role"] == "system" for turn in turns)
        texts = [turn["content"].join(self.around[turn["role"]]) for turn in turns]
        return ("" if spoken else self.absent) + "".join(texts) + self.opening

    @property
    def go(self) -> str:
        """The same in Go's template language, for Ollama."""
        absent = f"{{{{ if not .System }}}}{self.absent}{{{{ end }}}}" if self.absent else ""
        cases = "{{ else }}".join(
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self.around.items()
        )
        ends = "{{ end }}" * len(self.around)
        return f"{absent}{{{{ range .Messages }}}}{cases}{ends}{{{{ end }}}}{self.opening}"


def form_of(render: Render) -> Form | None:
    """The form of a template, or None if it is not one of text around turns."""
    try:
        form = _derived(render)
        if form is None or any("{{" in text or '"""' in text for text in _texts(form)):
            return None
        return form if all(render(turns, True) == form.render(turns) for turns in _conversations()) else None
    except UserError:  # a template that refuses a conversation without a user turn
        return None


def _derived(render: Render) -> Form | None:
    """The text around turns, from renderings of the shortest conversations."""
    system, user, answer = ({"role": role, "content": PROBES[0]} for role in ROLES)
    second = {"role": "user", "content": PROBES[1]}
    alone, opened = render([user], False), render([user], True)
    after_system = render([system, second], False)
    first, _, rest = after_system.partition(PROBES[0])
    if not opened.startswith(alone) or PROBES[1] not in rest:
        return None
    # the second of two equal turns has no text for an absent system before it
    twice = render([user, answer, second], False)
    between, _, tail = twice.partition(PROBES[0])[2].partition(PROBES[0])
    before_alone, _, after_user = alone.partition(PROBES[0])
    if not between.startswith(after_user) or not tail.endswith(PROBES[1] + after_user):
        return None
    gap = tail[: -len(PROBES[1] + after_user)]  # after the answer, before the user
    before_user = _common_end(gap, rest.partition(PROBES[1])[0], before_alone)
    if not before_user:
        return None
    around = {
        "system": (first, rest.partition(PROBES[1])[0].removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (between.removeprefix(after_user), gap.removesuffix(before_user)),
    }
    return Form(around, opened.removeprefix(alone), before_alone.removesuffix(before_user))


def _common_end(*texts: str) -> str:
    """The longest text that all end with and that begins at a mark: what stands before every user turn.

    The texts before it (an answer's end, a system turn's end) often end alike too, so it begins with the
    first character that the shortest of them has in common from its own start of a mark.
    """
    shortest = min(texts, key=len)
    for at in range(len(shortest)):
        end = shortest[at:]
        if all(text.endswith(end) for text in texts) and end[:1] in "<[":
            return end
    return ""


def _texts(form: Form) -> list[str]:
    return [form.opening, form.absent, *(text for pair in form.around.values() for text in pair)]


def _conversations() -> list[list[Turn]]:
    """Conversations that a form must render as the template does."""

    def turn(role: str, content: str) -> Turn:
        return {"role": role, "content": content}

    user, answer, system = turn("user", "What is 2 + 2?"), turn("assistant", "4"), turn("system", "Be brief.")
    return [
        [user],
        [system, user],
        [user, answer, turn("user", "再说一遍")],
        [system, user, answer, turn("user", "Why?\n\n1. x\n2. y"), turn("assistant", "Because."), user],
    ]


def modelfile(gguf: str, form: Form | None, stops: Sequence[str]) -> str:
    """The text of a Modelfile beside the file `gguf`."""
    lines = [f"FROM ./{gguf}"]
    if form is not None:
        lines.append(f'TEMPLATE """{form.go}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]
    return "\n".join(lines) + "\n"
