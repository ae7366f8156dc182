"""Agents, good and bad: each is run(base_url, row)."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request


def post(base_url, messages, **fields):
    body = json.dumps({"messages": messages, **fields}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


async def run(base_url, row):
    """Two turns. The reward counts a letter."""
    first = {"role": "user", "content": row["prompt"]}
    answer = await asyncio.to_thread(post, base_url, [first])
    again = await asyncio.to_thread(post, base_url, [first, answer, {"role": "user", "content": "Again?"}])
    return {"first": float(answer["content"].count("e")), "again": again["content"].count("e") / 2}


def echo(base_url, row):
    return {"port": float(base_url.split(":")[2].split("/")[0]), "n": float(row["n"])}


def mixed(base_url, row):
    """A fault for each row."""
    kind = row["kind"]
    if kind == "sleeps":
        time.sleep(99)
    if kind == "raises":
        raise KeyError("a key")
    if kind == "nan":
        return float("nan")
    if kind == "leaves":
        os._exit(3)
    if kind == "long":
        return {f"{'é' * 70}{i}": 1.0 for i in range(64)}
    if kind == "none":
        return None
    if kind == "forks":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    return 1.0


def kills(base_url, row):
    """The process of all runs, for one row."""
    if row["n"] == 3:
        os.kill(os.getppid(), 9)
        time.sleep(99)
    return float(row["n"])


def fetches(base_url, row):
    with urllib.request.urlopen(row["url"] or base_url) as answer:
        return float(len(answer.read()))


def three(base_url, row, more):
    return 1.0


def one(base_url):
    return 1.0
