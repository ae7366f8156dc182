"""A jinja2 sandbox that counts steps.

A chat template from a checkpoint may read and join its messages, but not run for hours or fill the memory.
jinja2's own sandbox keeps a template away from the interpreter and limits a range to 100,000; three nested
ranges are still 10^15 steps. Here each turn of a loop, each item of a range and each 100 characters made by +
* ~ % or a method costs one step, and a rendering may cost MAX_STEPS.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sized
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000  # of one rendering, about a second; a conversation of 1,000 turns takes some thousand
# the largest number a method or filter may be given (a width, a count), and the longest text or list made at
# once
MAX_NUMBER = 10_000_000
MAX_BITS = 10_000  # of an integer
_OF_DICT = frozenset(dir(dict))
_PLAIN = (dict, str)
"""What their methods do was judged when they were looked up: they are called at once, as macros are."""


class _Spent(threading.local):
    """Steps of this thread's rendering."""

    steps = 0


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """ImmutableSandboxedEnvironment whose templates raise TemplateError once they have cost MAX_STEPS.

    `begin` before each rendering.
    """

    filters: dict[str, Any]  # which jinja2 leaves without types
    globals: dict[str, Any]
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._spent = _Spent()
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters.update(_counted=self.counted, _joined=self.joined)
        for name in ("center", "indent", "format", "wordwrap", "truncate"):
            self.filters[name] = self._measured(self.filters[name])
        self.globals["range"] = self._range

    @staticmethod
    def rendered(template: jinja2.Template, given: dict[str, Any]) -> str:
        """The text of a template with these variables, and the environment's globals among them.

        template.render, which goes through all globals to copy them: a quarter of the time of a short
        conversation.
        """
        context = template.environment.context_class(
            template.environment, given, template.name, template.blocks
        )
        return "".join(template.root_render_func(context))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute, as the sandbox does it.

        A message's field is looked up at once: a dict of JSON has no attribute of that name. So is a method
        of a dict, which is no method of a text that formats.
        """
        if type(obj) is dict:
            if attribute in _OF_DICT:
                found = getattr(obj, attribute)
                if self.is_safe_attribute(obj, attribute, found):
                    return found
                return self.unsafe_undefined(obj, attribute)
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox asks for the object's type and the name only: one answer serves all messages."""
        asked = (type(obj), attr)
        if (answer := self._safe.get(asked)) is None:
            answer = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < 1000:
                self._safe[asked] = answer
        return answer

    def begin(self) -> None:
        """Set this thread's count back to 0, for a new rendering."""
        self._spent.steps = 0

    def charge(self, steps: int) -> None:
        """Raises TemplateError where the rendering has cost too much."""
        spent = self._spent
        spent.steps = steps = spent.steps + steps
        if steps > MAX_STEPS:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS:,} steps")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a {% for %}, each charged one step."""
        for item in items:
            self.charge(1)
            yield item

    def joined(self, items: list[Any]) -> str:
        """a ~ b, charged by its length."""
        self._made(sum(len(item) for item in items if isinstance(item, str)))
        return "".join(map(str, items))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() * right)
        elif isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() + right.bit_length())
        elif operator == "*":
            made = 1
            sides: tuple[object, ...] = (left, right)
            for side in sides:
                made *= len(side) if isinstance(side, Sized) else side if isinstance(side, int) else 0
            self._made(made)
        elif operator == "+":
            self._made(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        elif operator == "%" and isinstance(left, str):
            self._width(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        self.charge(1)
        # a number given to a macro (a tool's argument, say) is charged where the macro uses it
        if type(obj) is jinja2.runtime.Macro:
            named.pop("_loop_vars", None)
            named.pop("_block_vars", None)
            return obj(context.eval_ctx, *args, **named)
        if type(obj) is BuiltinMethodType and type(obj.__self__) in _PLAIN:
            named.pop("_loop_vars", None)
            named.pop("_block_vars", None)
            self._measure(obj.__self__, *args, *named.values())
            return obj(*args, **named)
        if not isinstance(obj, jinja2.runtime.Macro):
            self._measure(getattr(obj, "__self__", None), *args, *named.values())
        return super().call(context, obj, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """'{:>9999999999}'.format: the width is part of the text, so the text is checked."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def measured(*args: Any, **named: Any) -> str:
            self._width(value.__self__)
            return formatted(*args, **named)

        return measured

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Billed().visit(super()._parse(source, name, filename))

    def _range(self, *bounds: int) -> range:
        items = jinja2.sandbox.safe_range(*bounds)
        self.charge(len(items))
        return items

    def _measured(self, function: Any) -> Any:
        """A filter whose arguments are measured first."""
        # it is also given the environment or the context: measure the rest
        if hasattr(function, "jinja_pass_arg"):

            def measured(first: Any, *args: Any, **named: Any) -> Any:
                self._measure(*args, *named.values())
                return function(first, *args, **named)

            measured.jinja_pass_arg = function.jinja_pass_arg
            return measured

        def plain(*args: Any, **named: Any) -> Any:
            self._measure(*args, *named.values())
            return function(*args, **named)

        return plain

    def _measure(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise jinja2.TemplateError(f"the number {abs(value):.3g} is more than {MAX_NUMBER:,}")
            if isinstance(value, str):
                self._made(len(value))
                self._width(value) if len(value) < 1000 else None

    def _width(self, form: str) -> None:
        """Refuse a large width inside a format, "%9999999999d" or "{:>9999999999}"."""
        if "%" not in form and "{" not in form:
            return
        digits = "".join(char if char.isdigit() else " " for char in form).split()
        if any(len(number) > 7 for number in digits):
            raise jinja2.TemplateError("a width in a format has more than 7 digits")

    def _made(self, length: int) -> None:
        if length > MAX_NUMBER:
            raise jinja2.TemplateError(f"a text or list of {length:.3g} is longer than {MAX_NUMBER:,}")
        self.charge(max(0, length) // 100)

    def _number(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise jinja2.TemplateError(f"a number of more than {MAX_BITS:,} bits")


class _Billed(NodeTransformer):
    """{% for x in y %} -> {% for x in y | _counted %} and a ~ b -> [a, b] | _joined."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        items = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(items, "_joined", [], [], None, None, lineno=node.lineno)
