"""A traced template writes what the template writes, whatever the texts are; whatever asks a text for more ends
the trace."""

import itertools

import pytest

from unfreeze.data.tokens import tracing
from unfreeze.data.tokens.templates import ChatTemplate, TemplateRefusal

from .test_stepwise import LOOKS_AHEAD, PROMPT, STEPWISE, VARIABLES

TEXTS = ["", " ", "a", "Hello, there. ", "\n<think>\nhm\n</think>\nso", "</think>", "b", "[1]", "é'\"{{ x }}"]
EACH = "{% for m in messages %}{BODY};{% endfor %}"
TRACED = {
    "written": "{{ m.content }}",
    "by item": "{{ m['content'] }}",
    "by get": "{{ m.get('content', '-') }}",
    "trimmed": "{{ m.content | trim }}",
    "stripped": "{{ m.content.strip().rstrip('.') }}",
    "joined with +": "{% set line = '<' + m.role + '>' + m.content + '!' %}{{ line }}",
    "joined with ~": "{% set line = '<' ~ m.role ~ '>' ~ m.content %}{{ line ~ 1 }}",
    "asked": "{% if '</think>' in m.content %}T{% else %}{{ m.content }}{% endif %}",
    "asked twice": "{{ m.content.startswith('a') or m.content.endswith('b') }}{{ m.content == 'b' }}",
    "empty": "{{ m.content or 'nothing' }}{% if not m.content.strip() %}blank{% endif %}",
    "default": "{{ m.content | default('x', true) }}{{ m.name | default('nobody') }}",
    "of a type": "{{ m.content is string }}{{ m.content is mapping }}{{ m.content is none }}",
    "kept": "{% set ns = namespace(t='') %}{% set ns.t = m.content %}{{ ns.t }}",
    "counted": "{{ messages | length }}{{ loop.index }}{{ loop.last }}",
    "first of a role": "{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}",
    "a macro": "{% macro said(c) %}<{{ c }}>{% endmacro %}{{ said(m.content) + '.' }}",
    "a bare macro": "{% macro said(c) %}{{ c }}{% endmacro %}{{ said(m.content) | trim }}",
}
LOOKS = {
    "length": "{{ m.content | length }}",
    "slice": "{{ m.content[:2] }}",
    "letter": "{{ m.content[0] }}",
    "backwards": "{{ m.content[::-1] }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
    "replace": "{{ m.content.replace('a', 'b') }}{{ m.content | replace('a', 'b') }}",
    "upper": "{{ m.content | upper }}",
    "method upper": "{{ m.content.upper() }}",
    "letters": "{% for c in m.content %}{{ c }},{% endfor %}",
    "json": "{{ m.content | tojson }}",
    "json inside": "{{ {'a': [m.content]} | tojson }}",
    "find": "{{ m.content.find('a') }}",
    "text in words": "{{ m.content in 'abc' }}",
    "text not in words": "{{ m.content not in 'abc' }}",
    "text in words, in a chain": "{{ 'a' != m.content in 'abc' }}{{ 'a' == m.content not in 'b' }}",
    "joined with safe words": "{{ ('<' | safe) + m.content }}{{ m.content + ('x' | e) }}",
    "autoescape": "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    "text in a text": "{{ m.content in m.content + 'a' }}",
    "words in joined": "{{ '>a' in ('>' + m.content) }}",
    "compared": "{{ m.content < 'b' }}",
    "joined compared": "{{ (m.content ~ '') == 'a' }}",
    "macro looked at": "{% macro said(c) %}<{{ c }}>{% endmacro %}{{ said(m.content) | length }}",
    "macro asked": "{% macro said(c) %}<{{ c }}>{% endmacro %}{{ '<a>' in said(m.content) }}",
    "namespace looked at": "{% set ns = namespace(t=m.content) %}{{ ns.t | length }}",
    "set in a block": "{% set line %}{{ m.content }}{% endset %}{{ line | length }}",
    "filter block": "{% filter upper %}{{ m.content }}{% endfilter %}",
    "mapped": "{{ messages | map(attribute='content') | join('-') | length }}",
    "joined by a filter": "{{ [m.content, 'x'] | join | length }}",
    "joined by a method": "{{ '-'.join([m.content, 'x']) | length }}",
    "key": "{{ {'a': 1}[m.content] }}",
    "key of get": "{{ {'a': 1}.get(m.content, 2) }}",
    "among": "{{ m.content in ['a', 'b'] }}",
    "test": "{{ m.content is upper }}{{ m.content is in(['a']) }}{{ m.content is equalto 'a' }}",
    "chosen by content": "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
    "sorted": "{{ (messages | sort(attribute='content'))[0].content }}",
    "times": "{{ m.content * 2 }}",
    "percent": "{{ '%s!' % m.content }}",
    "format": "{{ '%s!' | format(m.content) }}{{ '{}!'.format(m.content) }}",
    "number": "{{ m.content | int }}",
    "escaped": "{{ m.content | e }}",
    "safe": "{{ (m.content | safe) | length }}",
    "first letter": "{{ m.content | first }}",
    "truncated": "{{ m.content | truncate(3) }}",
    "marks": "{% generation %}{{ m.content | length }}{% endgeneration %}",
    "stripped by a text": "{{ 'aba'.strip(m.content) }}{{ m.content.strip(m.role) }}",
    "changed": "{{ loop.changed(m.content) }}",
    "cycled": "{{ loop.cycle(m.content, 'b') | length }}",
    "other message": "{{ m.content == messages[0].content }}",
    "random": "{{ ['a', 'a'] | random }}{{ m.content }}",
}


def all_templates():
    bodies = {**TRACED, **LOOKS}
    made = {name: EACH.replace("{BODY}", body) + PROMPT for name, body in bodies.items()}
    return {**made, **{f"loop: {name}": text + PROMPT for name, text in {**STEPWISE, **LOOKS_AHEAD}.items()}}


def talks():
    """Conversations of a few shapes, the texts in every combination."""
    for first, second in itertools.product(TEXTS, TEXTS):
        yield [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    for text in TEXTS:
        yield [{"role": "system", "content": text}, {"role": "user", "content": "a", "name": text}]
        yield [{"role": "assistant", "content": None}, {"content": text, "role": "user"}]


def said(template, messages, prompt=False):
    try:
        return template.render(messages, add_generation_prompt=prompt)
    except TemplateRefusal as error:
        return error.message


def untraced(source):
    template = ChatTemplate(source, VARIABLES)
    template._traces.text = lambda *_: None
    template._steps = None
    return template


def differences(source, order=1):
    """-> the conversations of which a traced template writes something else, and the template."""
    template, plain = ChatTemplate(source, VARIABLES), untraced(source)
    wrong = [
        (messages, prompt)
        for messages in list(talks())[::order]
        for prompt in (False, True)
        if said(template, messages, prompt) != said(plain, messages, prompt)
    ]
    return wrong, template


def is_traced(template):
    return any(trace.parts is not None for traces in template._traces._traces.values() for trace in traces)


@pytest.mark.parametrize("name", all_templates())
def test_a_traced_template_writes_what_the_template_writes(name):
    wrong, template = differences(all_templates()[name])
    assert not wrong
    if name in TRACED:
        assert is_traced(template)
    if name in LOOKS:
        assert not is_traced(template) or name in ("joined compared", "letters", "other message")


def test_the_styles_of_releases(templates):
    for name, source in templates.items():
        wrong, template = differences(source)
        assert not wrong and is_traced(template), name


def test_the_second_conversation_of_a_shape_is_not_rendered(templates, monkeypatch):
    calls, real = [], ChatTemplate._run
    monkeypatch.setattr(ChatTemplate, "_run", lambda self, *given: calls.append(1) or real(self, *given))
    template = ChatTemplate(templates["chatml"], VARIABLES)
    for count, messages in enumerate(list(talks())[:81]):
        said(template, messages)
        assert len(calls) == 1 or not count


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("asked", "questions"),
        ("json", "guards"),
        ("text in words", "watch"),
        ("text in words, in a chain", "watch"),
        ("macro asked", "seal"),
        ("autoescape", "refusals"),
    ],
)
def test_without_its_guards_a_trace_would_be_wrong(name, without, monkeypatch):
    """The control arm. A trace is compared with the conversation it was made for: others show that it is wrong."""
    if without == "questions":
        monkeypatch.setattr(tracing.Trace, "holds", lambda *_: True)
    if without == "guards":
        monkeypatch.setattr(tracing, "_kept_from", lambda function: function)
    if without == "refusals":
        monkeypatch.setattr(tracing, "_REFUSED", tracing._REFUSED[:-2])
    if without == "watch":
        monkeypatch.setattr(tracing, "_not_a_text", lambda value: value)
    if without == "seal":
        monkeypatch.setattr(tracing.TracingEnvironment, "_sealed", lambda self, made: made)
    assert any(differences(all_templates()[name], order)[0] for order in (1, -1))


def test_a_text_answers_nothing_that_is_not_written_down():
    """Every method of str, and every one that a later Python adds, raises Looked."""
    text = tracing._Text.at(tracing._Conversation(), tracing.Hole(0, "content"), "a b")
    answered = {
        "strip",
        "lstrip",
        "rstrip",
        "startswith",
        "endswith",
        "__contains__",
        "__eq__",
        "__ne__",
        "__str__",
    }
    for name in set(dir(str)) - tracing._KEPT - answered:
        with pytest.raises(tracing.Looked):
            getattr(text, name)()
    for name in ("__class__", "__doc__", "__init_subclass__"):
        assert name in tracing._KEPT


def test_what_is_not_only_texts_is_rendered(templates):
    template = ChatTemplate(templates["chatml"], VARIABLES)
    for field in ({"tool_calls": []}, {"content": [{"type": "text", "text": "a"}]}, {"n": 1}):
        said(template, [{"role": "user", "content": "a", **field}])
    template.render([{"role": "user", "content": "a"}], tools=[{"type": "function"}])
    assert not template._traces._traces


GATHERS = "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"


@pytest.mark.parametrize("limit", [tracing.MOST_WORK, 10**12])
def test_a_row_is_refused_or_not_whatever_rows_were_before_it(limit, monkeypatch):
    """A template that gathers what it has written costs the square of the messages; 10**12 is the control arm."""
    monkeypatch.setattr(tracing, "MOST_WORK", limit)

    def row(text):
        return [{"role": "user", "content": text} for _ in range(600)]

    template = ChatTemplate(GATHERS, VARIABLES)
    assert said(template, row("a")) == "a" * 600 and is_traced(template)
    steps = "takes more than 2,000,000 steps"
    assert steps in said(untraced(GATHERS), row("a" * 1500))
    assert (steps in said(template, row("a" * 1500))) == (limit < 10**12)
    assert said(template, row("b" * 20)) == "b" * 12_000  # far from the limits, by the trace


def test_the_time_is_of_the_trace():
    from datetime import datetime

    template = ChatTemplate("{{ strftime_now('%Y') }}" + STEPWISE["plain"], VARIABLES)
    messages = [{"role": "user", "content": "a"}]
    template.render(messages)
    assert not template._traces._traces  # the clock's
    for year in (2001, 2002, 2001):
        template.now = datetime(year, 1, 1)
        assert template.render(messages).startswith(str(year))
        assert template.render([{"role": "user", "content": "b"}]) == f"{year}[user:b]"
