"""Which chat templates write one message after the other, and what each of them becomes.

Most do: something in front, a loop over the messages, and a prompt behind where one is asked for. The text of
a conversation then begins with the text of each of its beginnings, and one rendering gives them all. That
is read from the template's syntax tree, never from examples: a template that might look ahead (`loop.last`,
`messages[-1]`, `messages | length`, a second loop over the messages) is rendered each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jinja2
from jinja2 import nodes

MESSAGES, PROMPT = "messages", "add_generation_prompt"
MARK = f"\U000f0004{secrets.token_hex(8)}\U000f0004"
"""Written before each message and behind the last. Drawn anew in each process: no message can hold it."""

MOST_SETS = 200
"""Of a template that is looked at: each {% set %} is compared with each other."""
_BEHIND = frozenset(("first", "index", "index0", "previtem", "cycle", "changed"))
"""Of a loop: what depends on the messages so far only."""
_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.ContextReference,
    nodes.DerivedContextReference,
    nodes.Break,
)
_CHANGES = frozenset(("tools", "documents", "strftime_now"))
"""What is not the same in every rendering of one template."""


class Marked(NamedTuple):
    """A template's tree with a MARK before each message and behind the last.

    least: messages that a beginning of the conversation must have for its text to be a beginning too
    """

    tree: nodes.Template
    least: int


class Pieces(NamedTuple):
    """The text of a conversation: what is in front, one text a message, what is behind the last.

    skipped: messages that are not in the loop, since the template took them off the beginning
    """

    texts: list[str]
    behind: str
    skipped: int

    def upto(self, count: int) -> str | None:
        """The text of the first `count` messages without what is behind; None where it is not known."""
        shown = count - self.skipped
        return "".join(self.texts[: shown + 1]) if shown >= 0 else None


def pieces(text: str, count: int) -> Pieces | None:
    """A conversation of `count` messages as a Marked template rendered it, cut at its marks."""
    *texts, behind = text.split(MARK)
    skipped = count + 1 - len(texts)
    return Pieces(texts, behind, skipped) if texts and skipped >= 0 else None


def marked(tree: nodes.Template) -> Marked | None:
    """The tree with marks (it is changed); None where the template may look ahead or back."""
    found = _loop(tree)
    if found is None:
        return None
    place, sequences, least = found
    loop = tree.body[place]
    assert isinstance(loop, nodes.For)
    before, behind = tree.body[:place], tree.body[place + 1 :]
    if (
        any(tree.find_all(_REFUSED))
        or any(node.name == "random" for node in tree.find_all(nodes.Filter))
        or any(node.name in ("lipsum", "self") for node in tree.find_all(nodes.Name))
        or loop.recursive
        or loop.else_
        or loop.test is not None
        or not _only_known_uses(tree, loop, sequences)
        or not all(_looks_back(node) for node in loop.body)
        or _names([*before, loop]) & {PROMPT}
        or _names(behind) & (sequences | _CHANGES | _assigned(tree))
    ):
        return None
    mark = nodes.Output([nodes.TemplateData(MARK)])
    loop.body.insert(0, mark)
    tree.body.insert(place + 1, nodes.Output([nodes.TemplateData(MARK)]))
    tree.set_lineno(1)
    tree.set_environment(tree.environment or jinja2.Environment())
    return Marked(tree, least)


def _loop(tree: nodes.Template) -> tuple[int, frozenset[str], int] | None:
    """Where the one loop over the messages stands, the names that mean them, and the least of them.

    A name means them where it is set to them, or to them without the first few (`messages[1:]`), and to
    nothing else.
    """
    names, least = {MESSAGES}, 1
    sets = [
        (node.target.name, node.node)
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name)
    ]
    if len(sets) > MOST_SETS:
        return None
    for _ in sets:
        names |= {name for name, value in sets if _sequence(value, names) is not None}
    for name, value in sets:
        taken = _sequence(value, names)
        if name in names:
            if taken is None:
                return None
            least += taken
    places = [place for place, node in enumerate(tree.body) if _over(node, names)]
    if len(places) != 1 or sum(_over(node, names) for node in tree.find_all(nodes.For)) != 1:
        return None
    loop = tree.body[places[0]]
    assert isinstance(loop, nodes.For)
    least += _sequence(_iterated(loop), names) or 0
    return places[0], frozenset(names), least


def _over(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.For) and _sequence(_iterated(node), names) is not None


def _iterated(loop: nodes.For) -> nodes.Node:
    """What a loop goes over, out of the filter that counts it (untrusted/template_limits.py)."""
    over = loop.iter
    return over.node if isinstance(over, nodes.Filter) and over.name == "_counted" and over.node else over


def _sequence(node: nodes.Node, names: set[str] | frozenset[str]) -> int | None:
    """How many messages an expression takes off the beginning; None where it does not mean the messages."""
    if isinstance(node, nodes.Name):
        return 0 if node.name in names else None
    if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Slice):
        return None
    inner, part = _sequence(node.node, names), node.arg
    start = part.start.value if isinstance(part.start, nodes.Const) else None
    if inner is None or part.stop is not None or part.step is not None:
        return None
    return inner + start if isinstance(start, int) and start >= 0 else None


def _only_known_uses(tree: nodes.Template, loop: nodes.For, names: frozenset[str]) -> bool:
    """Whether the messages are read as the loop, as the first of them, and to be set to another name only."""
    known: set[int] = set()
    known.update(_leaf(_iterated(loop)))
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _sequence(node.node, names) is not None:
            known.update((id(node.target), *_leaf(node.node)))
    for node in tree.find_all(nodes.Getitem):
        first = isinstance(node.arg, nodes.Const) and node.arg.value is not False and node.arg.value == 0
        if first and isinstance(node.node, nodes.Name):
            known.add(id(node.node))
    inside = {
        id(node) for item in tree.find_all((nodes.For, nodes.Macro)) for node in item.find_all(nodes.Assign)
    }
    return all(id(name) in known for name in tree.find_all(nodes.Name) if name.name in names) and not any(
        id(node) in inside and _sequence(node.node, names) is not None for node in tree.find_all(nodes.Assign)
    )


def _leaf(node: nodes.Node) -> Iterator[int]:
    yield id(node)
    if isinstance(node, nodes.Getitem):
        yield from _leaf(node.node)


def _looks_back(node: nodes.Node) -> bool:
    """Whether `loop` is read in the body of the loop over the messages only for what depends on the past."""
    if isinstance(node, nodes.Name):
        return node.name != "loop"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
        return node.attr in _BEHIND
    if isinstance(node, nodes.For):  # another loop: `loop` is its own in its body, but not in its else
        outside = (node.target, node.iter, *([node.test] if node.test else []), *node.else_)
        return all(map(_looks_back, outside))
    return all(map(_looks_back, node.iter_child_nodes()))


def _names(body: Sequence[nodes.Node]) -> set[str]:
    return {
        name.name
        for node in body
        for name in (*node.find_all(nodes.Name), *([node] if isinstance(node, nodes.Name) else []))
    }


def _assigned(tree: nodes.Template) -> set[str]:
    """Every name that the template gives a value to: it can differ from one message to the next."""
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    return stored | {node.name for node in tree.find_all((nodes.Macro, nodes.NSRef))}
