"""A real HTTP server on this machine that answers as vLLM, SGLang or llama.cpp do, or as a faulty one does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["Server", BaseHTTPRequestHandler, dict[str, Any]], Any]
"""(server, the connection, the request's body) -> the answer's object; or None where it has answered itself."""


class Server:
    """url; asked: every request's (path, headers, body)."""

    def __init__(self, reply: Reply):
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, dict(self.headers), body))
                answer = reply(outer, self, body)
                if answer is not None:
                    say(self, 200, answer)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


def say(connection: BaseHTTPRequestHandler, status: int, answer: Any, **headers: str) -> None:
    raw = json.dumps(answer).encode()
    connection.send_response(status)
    for name, value in {"Content-Length": str(len(raw)), **headers}.items():
        connection.send_header(name.replace("_", "-"), value)
    connection.end_headers()
    connection.wfile.write(raw)


class Completions:
    """/v1/completions of tiny-k2, with log-probabilities as `kind` gives them.

    change  (choice) -> None: what a faulty server does to each
    """

    def __init__(self, model: Any, kind: str = "vllm", change: Callable[[dict[str, Any]], Any] | None = None):
        self.model, self.kind, self.change = model, kind, change or (lambda choice: None)

    def __call__(self, server: Server, connection: BaseHTTPRequestHandler, body: dict[str, Any]) -> Any:
        extra = {"prompt_logprobs", "return_token_ids"} & body.keys()
        if self.kind == "strict" and extra:
            said = {
                "error": {"message": f"Unrecognized request arguments supplied: {', '.join(sorted(extra))}"}
            }
            return say(connection, 400, said)
        if self.kind == "no echo" and body["echo"]:
            return say(connection, 400, {"error": {"code": 400, "message": "Only no echo is supported"}})
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            choice = {"index": index, "text": "", "finish_reason": "length", **self.words(prompt, body)}
            self.change(choice)
            choices.append(choice)
        return {"object": "text_completion", "choices": choices}

    def words(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        said_TV = self.model.logits([prompt])[0].log_softmax(-1)
        new = int(said_TV[-1].argmax())
        tokens, text = [*prompt, new], lambda id: self.model.tokenizer.decode([id], skip_specials=False)
        tops: list[dict[int, float] | None] = [None]
        for place in range(1, len(tokens)):
            values, ids = said_TV[place - 1].topk(body["logprobs"])
            listed = dict(zip(ids.tolist(), values.tolist(), strict=True))
            tops.append(listed | {tokens[place]: float(said_TV[place - 1, tokens[place]])})
        if self.kind == "vllm" and "prompt_logprobs" in body:
            listed = [
                top
                and {str(id): {"logprob": p, "rank": 1, "decoded_token": text(id)} for id, p in top.items()}
                for top in tops[: len(prompt)]
            ]
            return {"prompt_logprobs": listed, "prompt_token_ids": prompt}
        first = len(prompt) if self.kind == "new only" else 0
        by_text: list[dict[str, float] | None] = []
        for top in tops[first:]:
            entry: dict[str, float] = {}
            for id, p in sorted((top or {}).items(), key=lambda item: -item[1]):
                entry.setdefault(text(id), p)
            by_text.append(entry if top else None)
        places = range(first, len(tokens))
        owns = [None if place == 0 else tops[place][tokens[place]] for place in places]  # type: ignore[index]
        texts = [text(tokens[place]) for place in places]
        return {"logprobs": {"tokens": texts, "token_logprobs": owns, "top_logprobs": by_text}}


class Judging:
    """/v1/chat/completions of a judge: verdict(texts of the answers in the request) -> what it writes."""

    def __init__(self, verdict: Callable[[list[str]], str], ended: str = "stop"):
        self.verdict, self.ended = verdict, ended

    def __call__(self, server: Server, connection: BaseHTTPRequestHandler, body: dict[str, Any]) -> Any:
        answers = answers_in(body)
        message = {"role": "assistant", "content": self.verdict(answers)}
        return {"choices": [{"index": 0, "message": message, "finish_reason": self.ended}]}


def answers_in(body: dict[str, Any]) -> list[str]:
    """The answers that a judge is asked about, by its tags."""
    (message,) = body["messages"]
    return [text for _, text in re.findall(r"<(answer\w*)>\n(.*?)\n</\1>", message["content"], re.DOTALL)]


@contextmanager
def serve() -> Iterator[Callable[[Reply], Server]]:
    """Yield a function that starts a Server; all end with the block."""
    running: list[Server] = []

    def start(reply: Reply) -> Server:
        running.append(Server(reply))
        return running[-1]

    try:
        yield start
    finally:
        for server in running:
            server.close()
