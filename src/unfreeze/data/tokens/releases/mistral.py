"""Mistral: tool-call ids have nine letters or digits; the templates refuse any other form.

Magistral and the Ministral Reasoning models write `[THINK]…[/THINK]` before the answer; their templates read
it from a list of parts only.
"""

import hashlib

from unfreeze.data.tokens.releases.release import Release, ThinkMarks


def _call_id(name: str, index: int) -> str:
    return hashlib.blake2b(f"{name}:{index}".encode(), digest_size=8).hexdigest()[:9]


REASONING = Release(
    name="Magistral",
    signature=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    source="mistralai/Magistral-Small-2509, Ministral-3-14B-Reasoning-2512: chat_template.jinja",
    think=ThinkMarks("[THINK]", "[/THINK]"),
    call_id=_call_id,
    id_form="nine letters or digits",
)
RELEASE = Release(
    name="Mistral",
    signature=("[TOOL_CALLS]", "Tool call IDs should be alphanumeric strings with length"),
    source="mistralai/Mistral-7B-Instruct-v0.3, Mistral-Small-3.1-24B-Instruct-2503: chat_template",
    call_id=_call_id,
    id_form="nine letters or digits",
)
