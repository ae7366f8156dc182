"""`unfreeze doctor --bundle`: one text file to send along with a question.

It has versions, the machine, the checks, and of a run its configuration and its last events. Secrets, names
of folders, and texts of the data are left out.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from unfreeze.core.events import RESOLVED
from unfreeze.core.units import format_bytes, plural
from unfreeze.job.doctor.finding import Finding

PACKAGES = ("torch", "triton", "numba", "numpy", "safetensors", "tokenizers", "transformers", "liger-kernel")
VARIABLES = re.compile(r"^(UNFREEZE|TORCH|PYTORCH|CUDA|NCCL|TRITON|OMP|MKL|HSA|HIP|NVIDIA)_")
LAST = 60  # events
SECRET = re.compile(
    r"hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w+|glpat-[\w-]+|xox[a-z]-[\w-]+|AKIA\w{12,}"
    r"|AIza[\w-]{20,}|eyJ[\w-]{10,}[\w.-]*|\b[0-9a-f]{32,}\b|(?<=Bearer )\S+"
)
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|PW|CREDENTIAL|AUTH", re.IGNORECASE)
ADDRESS = re.compile(r"\b([A-Za-z][\w+.-]*)://[^\s\"'<>]+")  # with its host, which may be private
TEXTS = re.compile(r"prompt|system|variables")  # names of settings with words of the user
HOST = re.compile(r"\b[\w.+-]+@[\w.-]+\b|\b(?:\d{1,3}\.){3}\d{1,3}\b")  # mail and network addresses
HOME = re.compile(
    r"(?:[A-Za-z]:)?[\\/]+(?:home|Users|root)(?:[\\/]+[^\\/\s\"',:;)\]]+)?(?=$|[\\/\s\"',:;)\]])",
    re.MULTILINE,
)
PATH = re.compile(
    r"(?:(?<=^)|(?<=[\s\"'=(\[,:]))(?:~|…|[A-Za-z]:)?(?:[\\/]+[\w.@+%#&~ -]+?(?=[\\/]))+[\\/]+", re.MULTILINE
)


def bundle(findings: Iterable[Finding], run: Path | None, checks: Iterable[Path]) -> str:
    """The text. run: folder of a run. checks: files of timings and checks (kernels/choice/times.py)."""
    parts = [("versions", versions()), ("machine", machine()), ("environment", environment())]
    parts.append(("findings", "\n".join(f"{f.level:<5}  {f.check:<10}  {f.line}" for f in findings)))
    parts += [("checks", "\n".join(banned(file))) for file in checks]
    if run is not None:
        parts += [("run", settings(run)), ("events", events(run / "events.jsonl"))]
    text = "\n\n".join(f"== {name}\n{body}" for name, body in parts if body)
    return clean(text + "\n")


def clean(text: str) -> str:
    """Remove secrets, folders, and the names of user and machine."""
    secrets = [value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= 8]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "[removed]")
    text = HOST.sub("[removed]", text)
    text = ADDRESS.sub(r"\1://…", SECRET.sub("[removed]", text))
    text = PATH.sub("…/", HOME.sub("…", text))
    for name in {_user(), socket.gethostname()} - {"", "root", "localhost"}:
        text = re.sub(rf"\b{re.escape(name)}\b", "[removed]", text)
    return text


def versions() -> str:
    """unfreeze and the packages that it computes with."""
    import unfreeze
    from unfreeze.core.source import commit

    lines = [f"unfreeze {unfreeze.__version__}, commit {commit() or 'unknown'}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join([*lines, f"Python {platform.python_version()}, {platform.platform()}"])


def machine() -> str:
    """The processor, memory and cards."""
    import torch

    from unfreeze.core.cpu import cpu_class
    from unfreeze.kernels import cards
    from unfreeze.parallel.machine import hardware

    cpu = hardware("cpu")
    lines = [f"{cpu.name} ({cpu_class()}), {plural(cpu.cores, 'core')}, {format_bytes(cpu.available)} of"]
    lines[0] += f" {format_bytes(cpu.total)} free"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with suppress(RuntimeError):  # full or busy: the findings say so
        lines += [cards.card_of(torch.device("cuda", i)).words() for i in range(count)]
    return "\n".join(lines)


def environment() -> str:
    """The variables that change how torch and CUDA behave."""
    shown = {
        name: ":".join(map(cut, value.split(":")))
        for name, value in sorted(os.environ.items())
        if VARIABLES.match(name) and not SECRET_NAME.search(name)
    }
    return "\n".join(f"{name}={value}" for name, value in shown.items())


def banned(file: Path) -> list[str]:
    """The wrong kernels of a file of checks."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        wrong = [
            f"{row['op']}, {row['bucket']}, {row['dtype']}: {name} is wrong: {why}"
            for row in rows
            for name, why in row["wrong"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{file.name}: damaged"]
    return [f"{file.name}: {len(rows)} checked, {len(wrong)} wrong kernels", *wrong]


def settings(run: Path) -> str:
    """The configuration of a run, as it was resolved, without prompts."""
    try:
        fields = json.loads((run / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    kept = {name: value for name, value in fields.items() if not TEXTS.search(name)}
    return json.dumps(named(kept), indent=1, ensure_ascii=False)


def named(value: Any) -> Any:
    """`value` with each string that is a path, whatever is in it, cut to the path's last name."""
    if isinstance(value, dict):
        return {name: named(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [named(item) for item in cast("list[Any]", value)]
    return cut(value) if isinstance(value, str) else value


def cut(text: str) -> str:
    """The last name of a path, whatever is in it; other text as it is."""
    if not re.match(r"(~|/|[A-Za-z]:[\\/]|\\\\)", text):
        return text
    return "…" if HOME.fullmatch(text) else "…/" + re.split(r"[\\/]", text.rstrip("\\/"))[-1]


def events(file: Path) -> str:
    """The last events of a run, without texts of its data: no samples, and of the data only counts."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kept: list[str] = []
    for line in lines:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if event.get("kind") == "data":
            event = {
                name: value
                for name, value in event.items()
                if isinstance(value, int | float) or name == "kind"
            }
        if event.get("kind") != "sample":
            kept.append(json.dumps(named(event), ensure_ascii=False))
    return "\n".join(kept[-LAST:])


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""
