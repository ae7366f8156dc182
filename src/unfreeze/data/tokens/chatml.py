"""The special tokens and the chat template of a new tokenizer (trained.py).

    <|bos|><|im_start|>user
    question<|im_end|>
    <|im_start|>assistant
    <think>
    reasoning
    </think>

    answer<|im_end|>

The marks around turns are OpenAI's ChatML, those around tool calls the Hermes form of Qwen2.5 and Qwen3,
which `unfreeze grpo --env` reads (tool_calls.py). Tools are a system turn of their own. No turn is rewritten
when another follows, so a conversation is one example. {% generation %} encloses what the model writes:
transformers masks by it (return_assistant_tokens_mask).
"""

from __future__ import annotations

from collections.abc import Mapping

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
TURN_END = "<|im_end|>"
CONTROLS = (EOS, BOS, PAD, "<|im_start|>", TURN_END)
"""Left out when an answer is decoded, and never made from a user's text."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""One token each, but part of an answer's text, because programs read them there."""

ROLES: Mapping[str, str] = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}

TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nYou can call these tools:\\n' -}}
    {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
    {{- 'Write a call as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
            {%- if call.function.arguments is string -%}
                {{- call.function.arguments -}}
            {%- else -%}
                {{- call.function.arguments | tojson -}}
            {%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def reserved(count: int) -> list[str]:
    """Names of tokens that are kept for later: a vocabulary cannot grow without new rows of the embedding."""
    return [f"<|reserved_{i}|>" for i in range(count)]
