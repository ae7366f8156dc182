"""A jinja2 sandbox with a step limit.

A checkpoint's chat template must not run for hours or exhaust memory. jinja2's own sandbox isolates a
template from the interpreter and limits a range to 100,000, but three nested ranges are still 10^15 steps.
Here each loop iteration, each item of a range, and each 100 characters made by + * ~ % or a method cost one
step. A rendering can cost at most MAX_STEPS.
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

MAX_STEPS = 2_000_000  # per rendering, about a second; a conversation of 1,000 turns takes a few thousand
# largest number passed to a method or filter (a width, a count), and largest text or list made at once
MAX_NUMBER = 10_000_000
MAX_BITS = 10_000  # per integer
_OF_DICT = frozenset(dir(dict))
_PLAIN = (dict, str)
"""Methods of these types were checked at lookup, so they are called directly, like macros."""


class _Spent(threading.local):
    """Steps of this thread's rendering."""

    steps = 0


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """ImmutableSandboxedEnvironment whose templates raise TemplateError after MAX_STEPS.

    Call `begin` before each rendering.
    """

    filters: dict[str, Any]  # jinja2 has no types for these
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
    def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template with these variables, which must include the environment's globals.

        Faster than template.render, which copies all globals: a quarter of the time for a short conversation.
        """
        context = template.environment.context_class(
            template.environment, variables, template.name, template.blocks
        )
        return "".join(template.root_render_func(context))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute, with the sandbox's rules.

        Fields of a message are looked up directly, because a JSON dict has no attribute of that name. So are
        methods of a dict, because they do not format strings.
        """
        if type(obj) is dict:
            if attribute in _OF_DICT:
                value = getattr(obj, attribute)
                if self.is_safe_attribute(obj, attribute, value):
                    return value
                return self.unsafe_undefined(obj, attribute)
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Cache the sandbox's answer, which depends only on the object's type and the name."""
        key = (type(obj), attr)
        if (answer := self._safe.get(key)) is None:
            answer = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < 1000:
                self._safe[key] = answer
        return answer

    def begin(self) -> None:
        """Reset this thread's step count for a new rendering."""
        self._spent.steps = 0

    def charge(self, steps: int) -> None:
        """Count steps. Raises TemplateError above MAX_STEPS."""
        spent = self._spent
        spent.steps = steps = spent.steps + steps
        if steps > MAX_STEPS:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS:,} steps")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a {% for %}, counting one step each."""
        for item in items:
            self.charge(1)
            yield item

    def joined(self, items: list[Any]) -> str:
        """Evaluate a ~ b, counting steps by length."""
        self._made(sum(len(item) for item in items if isinstance(item, str)))
        return "".join(map(str, items))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() * right)
        elif isinstance(left, int) and isinstance(right, int):
            self._number(left.bit_length() + right.bit_length())
        elif operator == "*":
            length = 1
            sides: tuple[object, ...] = (left, right)
            for side in sides:
                length *= len(side) if isinstance(side, Sized) else side if isinstance(side, int) else 0
            self._made(length)
        elif operator == "+":
            self._made(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        elif operator == "%" and isinstance(left, str):
            self._width(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        self.charge(1)
        # a number passed to a macro (such as a tool's argument) is counted when the macro uses it
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
        """Check the text itself for '{:>9999999999}'.format, because it contains the width."""
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
        """Wrap a filter so that its arguments are measured first."""
        # its first argument is the environment or context: measure the others
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
