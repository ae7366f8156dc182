"""Mistral: tool-call ids have nine letters or digits; the templates refuse any other form."""

import hashlib

from unfreeze.data.releases.release import Release


def _call_id(name: str, index: int) -> str:
    return hashlib.blake2b(f"{name}:{index}".encode(), digest_size=8).hexdigest()[:9]


RELEASE = Release(
    name="Mistral",
    signature=("[TOOL_CALLS]", "Tool call IDs should be alphanumeric strings with length"),
    source="mistralai/Mistral-7B-Instruct-v0.3, Mistral-Small-3.1-24B-Instruct-2503: chat_template",
    call_id=_call_id,
    id_form="nine letters or digits",
)
