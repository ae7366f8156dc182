"""The sentences of the program, read from its source: errors, remedies, warnings, help. None is long, none holds a
phrase that has to be read twice."""

import ast
import functools
import re
from pathlib import Path

from unfreeze import cli

ROOMS = Path(cli.__file__).parent
DEVELOPERS = ("drill",)
CALLS = (
    "ConfigError",
    "DataError",
    "CheckpointError",
    "AdapterError",
    "DoesNotFit",
    "ValueError",
    "Finding",
    "append",
)
KEYWORDS = ("next", "message", "description")
BANNED = ("so many", "is said", "goes on", "of which", "told apart")
LONGEST, LONGEST_HELP = 140, 220  # characters, without values; help is wrapped at 80 columns


def written(node):
    """The text of an expression without its values; "" where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    if isinstance(node, ast.BinOp):
        return written(node.left) + written(node.right)
    return ""


@functools.cache  # counted, and looked at for faults
def sentences(source):
    """[(line, text, whether it is help)] of each message, remedy, warning and description."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        texts = [(keyword.value, keyword.arg) for keyword in call.keywords if keyword.arg in KEYWORDS]
        texts += [(text, "") for text in call.args if name in CALLS]
        found += [(text.lineno, words, of == "description") for text, of in texts if (words := written(text))]
    return found


def faults(source):
    """line: what is wrong."""
    for line, text, is_help in sentences(source):
        longest = LONGEST_HELP if is_help else LONGEST
        if len(text) > longest:
            yield f"{line}: {len(text)} characters, at most {longest}: {text}"
        yield from (f"{line}: {phrase!r}: {text}" for phrase in BANNED if phrase in text)


def test_no_sentence_is_long_or_has_to_be_read_twice():
    found, count = [], 0
    for path in sorted(ROOMS.rglob("*.py")):
        place = path.relative_to(ROOMS)
        if place.parts[0] not in DEVELOPERS:
            source = path.read_text(encoding="utf-8")
            count += len(sentences(source))
            found += [f"{place}:{fault}" for fault in faults(source)]
    assert not found, "say it in fewer words, one thought a sentence:\n" + "\n".join(found)
    assert count > 1_000


def test_no_banned_phrase_is_in_help():
    text = (Path(__file__).parent / "help.txt").read_text(encoding="utf-8")
    parts = [part for part in text.split("\n$ unfreeze ") if part.split()[0] not in ("dev", *cli.DEV)]
    plain = " ".join(" ".join(parts).split())
    assert not [phrase for phrase in BANNED if phrase in plain]


NOT_MANY = {"is", "has", "was", "as", "its", "this", "less"}


def one_as_many(text):
    """Counts such as '1 rows'."""
    counts = re.findall(r"(?<![\w.,#/:=-])1 ([a-z]+s)\b", text)
    return [f"1 {noun}" for noun in counts if noun not in NOT_MANY and not noun.endswith("ss")]


def test_no_transcript_counts_one_as_many():
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.txt")]
    assert len(texts) > 4 and not [fault for text in texts for fault in one_as_many(text)]


def test_control_arm_each_fault_is_seen():
    assert one_as_many("files: 1 rows; 11 rows, 2.1 tokens, 1 row, 1 is, 1 files") == ["1 rows", "1 files"]
    long = f'raise ConfigError(f"{{name}} {"word " * 30}", next="")'
    assert [fault.split(" ")[1] for fault in faults(long)] == ["151"]
    assert list(faults('DataError("row", next="a run goes on")')) == ["1: 'goes on': a run goes on"]
    assert list(faults(f'Field(description="{"word " * 40}")')) == []
    assert list(faults('ConfigError("a" + f"{b}" + "c", next=f"--{flag} {value}")')) == []
