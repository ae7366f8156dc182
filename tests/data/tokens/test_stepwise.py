"""One rendering for a conversation and all its beginnings: only where the template cannot look ahead."""

import time

import pytest

from unfreeze.data.tokens import stepwise
from unfreeze.data.tokens.templates import PLAIN_TEMPLATE, ChatTemplate, TemplateRefusal

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
LOOP = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<go>{% endif %}"
STEPWISE = {
    "plain": LOOP + PROMPT,
    "first and index": "{{ bos_token }}{% for m in messages %}{% if loop.first %}!{% endif %}{{ loop.index0 }}"
    "{{ (loop.previtem or {}).role }}{{ m.content | trim }}{{ loop.cycle('a', 'b') }}{% endfor %}" + PROMPT,
    "first taken off": "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest ="
    " messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{{ s }}{{ m.content }}"
    "{% endfor %}" + PROMPT,
    "state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m.content }}{% if m.role == 'user' %}{% continue %}{% endif %};{% endfor %}" + PROMPT,
    "inner loop": "{% for m in messages %}{% for c in m.content %}{{ c }}{% if loop.last %}.{% endif %}{% endfor %}"
    "{% endfor %}" + PROMPT,
    "tools in front": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + PROMPT,
    "macro": "{% macro said(m) %}{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ said(m) }}"
    "{% endfor %}" + PROMPT,
}
LOOKS_AHEAD = {
    "last": LOOP.replace("[", "{% if loop.last %}!{% endif %}["),
    "length": "{{ messages | length }}" + LOOP,
    "next": LOOP.replace("[", "{{ (loop.nextitem or {}).role }}["),
    "by number": LOOP.replace("[", "{{ (messages[loop.index0 + 1] or {}).role }}["),
    "from behind": "{{ messages[-1].content }}" + LOOP,
    "else of an inner loop": "{% for m in messages %}{{ m.content }}{% for c in [] %}{{ c }}{% else %}"
    "{% if loop.last %}!{% endif %}{% endfor %}{% endfor %}",
    "second loop": "{% for m in messages %}{{ m.role }}{% endfor %}" + LOOP,
    "reversed": LOOP.replace("messages", "messages[::-1]"),
    "alias": "{% set all = messages %}{% set ns = namespace(m=all) %}{{ ns.m | length }}" + LOOP,
    "alias of a pair": "{% set a, b, c, d = messages %}{{ d.role }}" + LOOP,
    "prompt known before": "{% set p = add_generation_prompt %}{% if p %}?{% endif %}" + LOOP,
    "state behind": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "filtered loop": "{% for m in messages if not loop is defined and m.role == messages[-1].role %}"
    "{{ m.content }}{% endfor %}",
    "loop given away": "{% macro end(l) %}{{ l.last }}{% endmacro %}{% for m in messages %}{{ end(loop) }}{% endfor %}",
    "loop by item": LOOP.replace("[", "{{ loop['last'] }}["),
    "set in a block": "{% set messages %}{{ messages | length }}{% endset %}{{ messages }}",
    "break": LOOP.replace("[", "{% if loop.index == 2 %}{% break %}{% endif %}["),
}
TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is 6 x 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And \u00e9\U000f0004?"},
    {"role": "assistant", "content": "So."},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def renderings(template, messages, tools=None):
    """The conversation, then each of its beginnings with and without a prompt, as a row's examples are made."""
    found = []
    for count, prompt in [(len(messages), False)] + [
        (n, p) for n in range(len(messages) + 1) for p in (0, 1)
    ]:
        try:
            found.append(template.render(messages[:count], add_generation_prompt=bool(prompt), tools=tools))
        except TemplateRefusal as error:
            found.append(error.message)
    return found


def each_time(source):
    """The same template, rendered each time."""
    template = ChatTemplate(source, VARIABLES)
    template._steps = None
    return template


@pytest.fixture
def counted(monkeypatch):
    """-> a list that gets an entry for each rendering."""
    calls, real = [], ChatTemplate._run
    monkeypatch.setattr(ChatTemplate, "_run", lambda self, *given: calls.append(1) or real(self, *given))
    return calls


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("messages", [TALK, TALK[1:], TALK[1:3]], ids=["system", "talk", "pair"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_one_rendering_gives_every_beginning_its_own_text(name, messages, tools, counted):
    template = ChatTemplate(STEPWISE[name], VARIABLES)
    assert template._steps is not None
    wanted = renderings(each_time(STEPWISE[name]), messages, tools)
    alone = len(counted)
    assert renderings(template, messages, tools) == wanted
    assert len(counted) - alone <= 6 < alone


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_a_template_that_may_look_ahead_is_rendered_each_time(name, monkeypatch):
    source = LOOKS_AHEAD[name]
    assert ChatTemplate(source, VARIABLES)._steps is None


@pytest.mark.parametrize(
    "name", ["last", "length", "next", "by number", "prompt known before", "state behind"]
)
def test_without_the_look_at_the_tree_its_beginnings_would_be_wrong(name, monkeypatch):
    """The control arm: the same template, taken for one that cannot look ahead."""
    monkeypatch.setattr(stepwise, "_only_known_uses", lambda *_: True)
    monkeypatch.setattr(stepwise, "_looks_back", lambda _: True)
    monkeypatch.setattr(stepwise, "_names", lambda _: set())
    template = ChatTemplate(LOOKS_AHEAD[name] + PROMPT, VARIABLES)
    assert template._steps is not None
    assert renderings(template, TALK) != renderings(each_time(LOOKS_AHEAD[name] + PROMPT), TALK)


def test_the_styles_of_releases(templates, counted):
    known = {"chatml", "llama3", "kimi", "indented", "plain"}  # the others look at all messages first
    for name, source in {**templates, "plain": PLAIN_TEMPLATE}.items():
        template = ChatTemplate(source, VARIABLES)
        assert (template._steps is not None) == (name in known), name
        for messages in (TALK, TALK[1:]):
            assert renderings(template, messages) == renderings(each_time(source), messages)


def test_a_template_of_many_sets_is_not_looked_at_for_long():
    source = "".join(f"{{% set a{n} = a{n + 1} %}}" for n in range(5000)) + LOOP
    began = time.process_time()
    assert ChatTemplate(source, VARIABLES)._steps is None
    assert time.process_time() - began < 10  # compared with each other they take minutes


def test_other_messages_and_other_tools_are_rendered_anew():
    template = ChatTemplate(STEPWISE["tools in front"], VARIABLES)
    first = template.render(TALK)
    equal = [dict(message) for message in TALK]
    equal[0]["content"] = "Other"
    assert template.render(equal[:3]) == each_time(STEPWISE["tools in front"]).render(equal[:3])
    assert template.render(TALK[:3], tools=TOOLS) == each_time(STEPWISE["tools in front"]).render(
        TALK[:3], tools=TOOLS
    )
    assert template.render(TALK) == first
