"""A template from a checkpoint ends soon, whatever stands in it; what real templates do is untouched."""

import time

import jinja2
import jinja2.sandbox
import pytest

from unfreeze.core.errors import DataError
from unfreeze.data.tokens.templates import ChatTemplate
from unfreeze.untrusted import template_limits

TALK = [
    {"role": "user", "content": "hello", "parts": [{"text": "a"}, {"text": "b"}]},
    {"role": "assistant", "content": "you"},
]
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{{ 2 ** 999999999 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{{ '%9999999999d' % 1 }}",
    "{{ 'a'.rjust(10 ** 10) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 10) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_is_refused_soon(source):
    started = time.perf_counter()
    with pytest.raises(DataError, match="the chat template refuses these messages: "):
        ChatTemplate(source, {}).render(TALK)
    assert time.perf_counter() - started < 10


def test_control_without_the_bill_the_loops_go_on(monkeypatch):
    source = "{% for i in range(100) %}{% for j in range(100) %}{% endfor %}{% endfor %}done"
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10_000)
    with pytest.raises(DataError, match="more than 10,000 steps"):
        ChatTemplate(source, {}).render(TALK)
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10**9)
    assert ChatTemplate(source, {}).render(TALK) == "done"


@pytest.mark.parametrize(
    "source",
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{"
            " m.role ~ ': ' ~ m.content }}{% endfor %}"
        ),
        "{% for m in messages if m.role == 'user' %}{{ m.content | upper }}{% else %}none{% endfor %}",
        "{{ messages[0].content + 'x' * 3 }} {{ 7 * 6 % 5 }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
        "{{ '%s-%03d' % ('a', 7) }} {{ '{:>5}'.format('x') }} {{ 'x' | center(9) }}|",
        (
            "{% macro part(p) %}[{{ p.text }}]{% endmacro %}{% for p in messages[0].parts %}{{ part(p) }}{%"
            " endfor %}"
        ),
        "{{ messages | map(attribute='role') | join('+') }}",
        (
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n"
            " ** 2 }}"
        ),
        "{{ 'a\nb' | indent(2) }}",
        "{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
        "{{ ('a' ~ 1 ~ none) | string }}{{ undefined ~ 'x' }}",
        "{{ messages[0].__class__ }}{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_equal_to_jinja2s_own_sandbox(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ChatTemplate(source, {}).render(TALK) == plain.from_string(source).render(messages=TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0]['setdefault']('more', 1) }}",
        "{{ messages[0].get.__self__.__class__.__mro__ }}",
        "{% for m in messages %}{{ m.clear() }}{% endfor %}",
    ],
)
def test_what_jinja2s_own_sandbox_refuses_is_refused(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    with pytest.raises(jinja2.exceptions.SecurityError):
        plain.from_string(source).render(messages=TALK)
    before = [dict(message) for message in TALK]
    with pytest.raises(DataError, match="unsafe"):
        ChatTemplate(source, {}).render(TALK)
    assert before == TALK


def test_each_rendering_begins_anew(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 300)
    template = ChatTemplate("{% for i in range(100) %}{% endfor %}", {})
    for _ in range(5):  # 200 steps each
        template.render(TALK)
