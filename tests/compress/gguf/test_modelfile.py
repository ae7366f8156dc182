"""Ollama's TEMPLATE: derived from a chat template, and only where whole conversations come out alike."""

import pytest

from unfreeze.compress.gguf.modelfile import form_of, modelfile
from unfreeze.data.tokens.templates import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    + CHATML
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.first %}{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}<|{{ loop.index }}|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
LATER = CHATML.replace(
    "{{ m.content }}", "{% if not loop.last %}<{{ m.content }}>{% else %}{{ m.content }}{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def renderer(source):
    template = ChatTemplate(source, {})
    return lambda turns, opened: template.render(turns, add_generation_prompt=opened)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, PHI3, QWEN25, MISTRAL])
def test_text_around_turns_is_written_in_go(source):
    render = renderer(source)
    form = form_of(render)
    assert form is not None
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    assert go(form.go, turns) == render(turns, True)
    assert go(form.go, turns[1:]) == render(turns[1:], True)


@pytest.mark.parametrize("source", [NUMBERED, LATER, REFUSES])
def test_another_template_is_left_to_the_file(source):
    assert form_of(renderer(source)) is None


def go(text, turns):
    """The few words of Go's templates that are written, done in Python."""
    head, _, rest = text.partition("{{ range .Messages }}")
    if head:
        system = any(turn["role"] == "system" for turn in turns)
        head = head.removeprefix("{{ if not .System }}").removesuffix("{{ end }}")
        head = "" if system else head
    body, _, opening = rest.rpartition("{{ end }}")
    while body.endswith("{{ end }}"):
        body = body.removesuffix("{{ end }}")
    around = {}
    for case in body.split("{{ else }}"):
        role, _, inner = case.removeprefix('{{ if eq .Role "').partition('" }}')
        around[role] = inner
    return (
        head
        + "".join(around[turn["role"]].replace("{{ .Content }}", turn["content"]) for turn in turns)
        + opening
    )


def test_the_file():
    form = form_of(renderer(CHATML))
    text = modelfile("m.gguf", form, ["<|im_end|>", "", '"'])
    assert text.startswith(
        'FROM ./m.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n'
    )
    assert text.endswith('<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\n')
    assert modelfile("m.gguf", None, ["</s>"]) == 'FROM ./m.gguf\nPARAMETER stop "</s>"\n'
