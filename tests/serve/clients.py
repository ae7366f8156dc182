"""Many clients in one process, without any library: python clients.py PORT AT_ONCE SECONDS < numbers.json

Each request has a number, which its answer must name. Prints what came back as JSON.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass, field

SECONDS = 30  # of a load, at most


@dataclass
class Load:
    """What came back: status -> answers; number -> the texts of its answers; refusals without Retry-After."""

    statuses: Counter = field(default_factory=Counter)
    answers: dict = field(default_factory=dict)
    bare: list = field(default_factory=list)

    @classmethod
    def read(cls, text):
        fields = json.loads(text)
        ints = {
            name: {int(key): each for key, each in fields[name].items()} for name in ("statuses", "answers")
        }
        return cls(Counter(ints["statuses"]), ints["answers"], fields["bare"])


def request(number, host="127.0.0.1", **fields):
    """The bytes of one request; its answer has to name `number`."""
    message = {"role": "user", "content": f"number {number}."}
    body = json.dumps({"messages": [message], "max_tokens": 8, "temperature": 0, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answered(reader):
    """Read one answer. -> status, headers, body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


async def loaded(port, numbers, at_once, load, seconds=SECONDS):
    """Send a request for each number, `at_once` connections at a time, and keep what comes."""
    left = iter(numbers)

    async def client():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in left:
            writer.write(request(number))
            status, headers, body = await answered(reader)
            load.statuses[status] += 1
            if status == 200:
                text = json.loads(body)["choices"][0]["message"]["content"]
                load.answers.setdefault(number, []).append(text)
            elif "retry-after" not in headers:
                load.bare.append(status)
        writer.close()

    async with asyncio.timeout(seconds):
        await asyncio.gather(*(client() for _ in range(at_once)))


def main():
    port, at_once, seconds = map(int, sys.argv[1:])
    load = Load()
    asyncio.run(loaded(port, json.load(sys.stdin), at_once, load, seconds))
    print(json.dumps(vars(load)))


if __name__ == "__main__":
    main()
