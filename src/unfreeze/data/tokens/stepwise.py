"""Detect chat templates that write one message after the other, and cut their rendering into messages.

Most do: a head, a loop over the messages, and a prompt at the end if requested. The rendering of a
conversation then starts with the rendering of each of its prefixes, so one rendering gives them all. This is
decided from the template's syntax tree, never from examples. A template that might look ahead (`loop.last`,
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
"""Written before each message and after the last. Random in each process, so no message can contain it."""

MOST_SETS = 200
"""Maximum number of {% set %} tags examined in a template: each is compared with each other."""
_BEHIND = frozenset(("first", "index", "index0", "previtem", "cycle", "changed"))
"""Attributes of `loop` that depend only on the messages so far."""
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
"""Names that can differ between renderings of one template."""


class Marked(NamedTuple):
    """A template's tree with a MARK before each message and after the last.

    least: minimum number of messages in a prefix for its rendering to be a prefix too
    """

    tree: nodes.Template
    least: int


class Pieces(NamedTuple):
    """The rendering of a conversation: the head, one text per message, and the tail.

    skipped: number of first messages that the template handles outside the loop
    """

    texts: list[str]
    behind: str
    skipped: int

    def upto(self, count: int) -> str | None:
        """Return the text of the first `count` messages without the tail; None if unknown."""
        shown = count - self.skipped
        return "".join(self.texts[: shown + 1]) if shown >= 0 else None


def pieces(text: str, count: int) -> Pieces | None:
    """Cut a Marked template's rendering of `count` messages at its marks."""
    *texts, behind = text.split(MARK)
    skipped = count + 1 - len(texts)
    return Pieces(texts, behind, skipped) if texts and skipped >= 0 else None


def marked(tree: nodes.Template) -> Marked | None:
    """Add marks to the tree (in place); return None if the template may look ahead or back."""
    loop_info = _loop(tree)
    if loop_info is None:
        return None
    place, sequences, least = loop_info
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
    """Find the one loop over the messages: (its index, names of the messages, messages skipped).

    A name counts if it is only ever set to the messages, or to them without the first few (`messages[1:]`).
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
    """Return the iterable of a loop, inside the filter that counts it (untrusted/template_limits.py)."""
    over = loop.iter
    return over.node if isinstance(over, nodes.Filter) and over.name == "_counted" and over.node else over


def _sequence(node: nodes.Node, names: set[str] | frozenset[str]) -> int | None:
    """Return how many first messages an expression drops; None if it is not the messages."""
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
    """Return True if the messages are used only in the loop, as first message, or to set another name."""
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
    """Return True if the loop's body uses `loop` only for what depends on earlier messages."""
    if isinstance(node, nodes.Name):
        return node.name != "loop"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
        return node.attr in _BEHIND
    if isinstance(node, nodes.For):  # an inner loop has its own `loop` in its body, but not in its else
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
    """Return every name the template assigns, which can therefore differ between messages."""
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    return stored | {node.name for node in tree.find_all((nodes.Macro, nodes.NSRef))}
