"""A plan's requests as batch files, and the results of a batch.

    request   {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    result    {"custom_id": key, "response": {"status_code": 200, "body": {…}}, "error": null}

These are OpenAI's forms, which others take too. A file has at most 50,000 requests and 500 MB, both fields of
the recipe. All requests are booked before the first file is there: from then on anyone may submit it.
PLAN/batches.jsonl names the requests that wait for a result; they are not sent a second time, unless with
--again, which books them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.files import sync_folder
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.synth.prompts import Request
from unfreeze.synth.run import NO, OF_ONE, Open, looked_at, now
from unfreeze.teach.address import WORDS
from unfreeze.teach.answers import Answer
from unfreeze.teach.chat import answer_of
from unfreeze.untrusted.json_object import is_object, parse_object

FILE = "batches.jsonl"
URL = "/v1/chat/completions"


def waiting(folder: Path) -> dict[str, str]:
    """Return key -> batch file, of requests that were written into a file and have no result yet."""
    there: dict[str, str] = {}
    for number, line in enumerate(whole_lines(folder / FILE), 1):
        entry = parse_object(line, f"{folder / FILE}, line {number}", ConfigError)
        there[str(entry.get("key"))] = str(entry.get("file") or "")
    return {key: file for key, file in there.items() if file}


def refuse_waiting(folder: Path) -> None:
    """Raise ConfigError if requests wait in batch files: sent again, they would be billed twice."""
    if there := waiting(folder):
        raise ConfigError(
            f"{len(there):,} requests wait in {sorted(set(there.values()))[0]}, which may be submitted",
            next="--batch-results FILE; or --again, which books and asks them again",
        )


def write_batches(at: Open, folder: Path, *, again: bool) -> list[Path]:
    """Book what is missing, and write it into files. -> the files.

    Answers come first; a judge's questions are written when both answers of a pair are there.
    Raises ConfigError at the ceiling, before any file is written.
    """
    if not again:
        refuse_waiting(at.folder)
    missing = at.answers_missing() or at.verdicts_missing()
    parts = list(_parts(missing, at.recipe.batch_requests, at.recipe.batch_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    at.ledger.book_all((request.key, request.read, request.written) for request in missing)
    files: list[Path] = []
    for requests in parts:
        file = _next(folder)
        _write(file, requests)
        _record(at.folder, {request.key: str(file.resolve()) for request in requests})
        files.append(file)
    return files


def read_results(at: Open, path: Path) -> dict[str, int]:
    """Keep the answers of a batch's results. -> answers, failed, known (kept before).

    A request that failed may be asked again. Raises DataError for a line that is no result, or is of another
    plan; what stands before it is kept.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}", next="--batch-results FILE, as the server gave it")
    own = {request.key: request for request in [*at.requests.first, *at.verdicts_missing()]}
    counts, done = {"answers": 0, "failed": 0, "known": 0}, dict[str, str]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            key, came = _result(parse_object(line, where, DataError), where)
            if key in at.kept.known:
                counts["known"] += 1
                continue
            if (request := own.get(key)) is None:
                raise DataError(f"{where} answers {key!r}, which this plan did not ask", next="another file")
            if isinstance(came, Answer):
                ledger = at.ledger if at.recipe.trust_usage else None
                came = looked_at(request, came, at.requests.count if at.recipe.tokenizer else None, ledger)
                at.kept.keep(key, came, sync=False)
            counts["answers" if isinstance(came, Answer) else "failed"] += 1
            done[key] = ""
    _record(at.folder, done)
    return counts


def _result(record: dict[str, Any], where: str) -> tuple[str, Answer | str]:
    """Return (key, the answer or the words of an error) of a line."""
    key, response = record.get("custom_id"), record.get("response")
    if not isinstance(key, str) or not (is_object(response) or record.get("error")):
        raise DataError(f"{where} is no result of a batch", next="give the file of results, not of requests")
    if not is_object(response):
        return key, json.dumps(record["error"])[:WORDS]
    body, status = response.get("body"), response.get("status_code")
    if not is_object(body) or status != 200:
        words = json.dumps(body)[:WORDS]
        if status in OF_ONE:  # it would be refused again
            return key, Answer("", NO, about={"error": words, "time": now()})
        return key, words
    return key, answer_of(body, where)


def _parts(requests: Sequence[Request], most: int, size: int) -> Iterator[list[Request]]:
    """Split requests into files of at most so many, and so many bytes."""
    part: list[Request] = []
    room = size
    for request in requests:
        line = len(_line(request))
        if line > size:
            raise ConfigError(
                f"row {request.seed.row}: its request has {line:,} bytes, batch_bytes is {size:,}"
            )
        if part and (len(part) == most or line > room):
            yield part
            part, room = [], size
        part.append(request)
        room -= line
    if part:
        yield part


def _line(request: Request) -> bytes:
    whole = {"custom_id": request.key, "method": "POST", "url": URL, "body": request.body}
    return json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _next(folder: Path) -> Path:
    """Return the next free name, batch-0001.jsonl."""
    number = 1 + len(list(folder.glob("batch-*.jsonl")))
    while (path := folder / f"batch-{number:04d}.jsonl").exists():
        number += 1
    return path


def _write(path: Path, requests: Sequence[Request]) -> None:
    """Write a file line by line, atomically: it may have 500 MB."""
    partly = path.with_name(f".{path.name}.unfinished")
    try:
        with partly.open("wb") as file:
            file.writelines(map(_line, requests))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partly, path)
    finally:
        partly.unlink(missing_ok=True)
    sync_folder(path.parent)


def _record(folder: Path, files: dict[str, str]) -> None:
    with appending(folder / FILE) as file:
        file.writelines(json.dumps({"key": key, "file": name}) + "\n" for key, name in files.items())
        file.flush()
        os.fsync(file.fileno())
