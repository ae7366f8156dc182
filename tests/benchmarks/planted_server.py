"""A server of /v1/completions whose answers have as many tokens as asked for, or one less: `python -m … less`; --broken: none."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = body["max_tokens"] - (sys.argv[1] == "less")
        events = [{"choices": [{"text": "t1"}]}] * tokens + [
            {"choices": [], "usage": {"completion_tokens": tokens}}
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("this server does not start")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
