"""Seed-OSS: `<seed:think>…</seed:think>⏎` before the answer, which the template writes in every turn."""

from unfreeze.data.tokens.releases.release import Release, ThinkMarks

RELEASE = Release(
    name="Seed-OSS",
    signature=("<seed:bos>", "<seed:think>"),
    source="ByteDance-Seed/Seed-OSS-36B-Instruct: chat_template.jinja",
    think=ThinkMarks("<seed:think>", "</seed:think>\n"),
)
