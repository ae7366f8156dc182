"""Environments inside a grader's process: one object for each answer, kept from its first turn to its reward.

The contract is that of TRL 1.16's environment_factory: reset(**row) -> str | None, public typed methods are
tools, get_reward() -> float is optional. Methods may be async.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.rollout.reward import Graded, score
from unfreeze.rollout.tool_schema import tool_schema

OWN = ("reset", "get_reward")
MAX_TEXT = 2**13  # characters of a tool's result; a model's window is not larger than some of these

Awaited = Callable[[Any], Any]
InWords = Callable[[BaseException], str]


def methods_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment: the public methods of its class, as TRL lists them.

    A tool's name is its function's, which a decorator may have changed.
    """
    methods = [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if not name.startswith("_") and name not in OWN
    ]
    return {method.__name__: method for method in methods}


class Held:
    """The environments that this process holds.

    awaited, in_words  from child.py: the value of an awaitable; an error on one line
    """

    def __init__(self, awaited: Awaited, in_words: InWords):
        self._awaited, self._in_words = awaited, in_words
        self._factories: dict[str, Callable[[], Any]] = {}
        self._living: dict[str, Any] = {}

    def meet(self, factories: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Make one environment of each factory. -> name -> its tools' schemas, and True if it has a reward.

        Raises ConfigError for one without reset, or with a tool that a model cannot be told about.
        """
        self._factories = dict(factories)
        known: dict[str, Any] = {}
        for name, factory in factories.items():
            try:
                environment = factory()
            except TypeError as error:
                raise ConfigError(
                    f"{getattr(factory, '__name__', name)} cannot be made: {self._in_words(error)}",
                    next="an environment is a class without arguments; a function is a --reward",
                ) from None
            kind = type(environment).__name__
            if not callable(getattr(environment, "reset", None)):
                raise ConfigError(
                    f"{kind} has no method reset", next="def reset(self, **row) -> str | None: return None"
                )
            tools = [tool_schema(method) for method in methods_of(environment).values()]
            scores = callable(getattr(environment, "get_reward", None))
            known[name] = {"kind": kind, "tools": tools, "scores": scores}
        return {"environments": known}

    def turn(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the calls of one turn; make the environment first if it is not here (any more).

        request: id, environment, row, past (calls of earlier turns), calls, and score: True at the end
        -> results of the calls; opened and replayed if it was made: reset's text, and results of `past`;
        graded if score; failed, in words, if it could not be made
        """
        os.chdir(tempfile.gettempdir())
        reply: dict[str, Any] = {}
        if request["id"] not in self._living:
            try:
                environment = self._factories[request["environment"]]()
                text = self._awaited(environment.reset(**request["row"]))
            except BaseException as error:
                return {"failed": f"reset: {self._in_words(error)}"}
            if not isinstance(text, str | None):
                return {"failed": f"reset returned a {type(text).__name__}, not a text or None"}
            self._living[request["id"]] = environment
            reply["opened"] = text and _whole(text)
            reply["replayed"] = [self._call(environment, call)["text"] for call in request["past"]]
        environment = self._living[request["id"]]
        reply["results"] = [self._call(environment, call) for call in request["calls"]]
        if request["score"]:
            reply["graded"] = self._score(environment).as_json()
            del self._living[request["id"]]
        return reply

    def _call(self, environment: object, call: Mapping[str, Any]) -> dict[str, str]:
        """Call a tool. -> its result as text, and the kind of fault, if any; the text names the fault."""
        methods = methods_of(environment)
        name, arguments = call["name"], call["arguments"]
        if name not in methods:
            there = ", ".join(methods) or "none"
            return _fault(
                "unknown tool", f"there is no tool {name!r}{nearest(name, methods)}; there are: {there}"
            )
        try:
            inspect.signature(methods[name]).bind(**arguments)
        except TypeError as error:
            return _fault("wrong arguments", f"{name}: {error}")
        try:
            return {"text": _whole(str(self._awaited(methods[name](**arguments))))[:MAX_TEXT], "fault": ""}
        except MemoryError as error:
            return _fault("memory", f"{name}: {self._in_words(error)}")
        except BaseException as error:
            return _fault("error", f"{name}: {self._in_words(error)}")

    def _score(self, environment: Any) -> Graded:
        if not callable(getattr(environment, "get_reward", None)):
            return Graded(None, outcome="no value", message=f"{type(environment).__name__} has no get_reward")
        try:
            return score({type(environment).__name__: self._awaited(environment.get_reward())})
        except MemoryError as error:
            return Graded(None, outcome="memory", message=self._in_words(error))
        except BaseException as error:
            return Graded(None, outcome="error", message=self._in_words(error))


def _whole(text: str) -> str:
    """Return the text with ? for half surrogate pairs, as names of files have them: no token spells these."""
    return text.encode("utf-8", "replace").decode()


def _fault(kind: str, text: str) -> dict[str, str]:
    return {"text": f"error: {text}"[:MAX_TEXT], "fault": kind}
