"""A browser without a window, spoken to over its own pipe: the DevTools protocol, JSON ended by NUL.

Needs chromium or chrome on the PATH and no library. Source of the names: chromedevtools.github.io, and
--remote-debugging-pipe of Chromium, which reads from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
FLAGS += ("--disable-background-networking", "--disable-extensions", "--hide-scrollbars")
KEYS = {
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "/": 191,
}


class Browser:
    """One process; `open` gives it a page of its own."""

    def __init__(self, profile: Path):
        assert PROGRAM
        (reads, self._out), (self._in, writes) = os.pipe(), os.pipe()
        shell = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        command = ["bash", "-c", shell, PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(reads, writes), stdout=quiet, stderr=quiet)
        os.close(reads)
        os.close(writes)
        self._number, self._rest = 0, b""

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)

    def ask(self, method: str, session: str = "", events: list[Any] | None = None, **params: Any) -> Any:
        """The result of a call. Events that come before it are appended to `events`."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        os.write(self._out, json.dumps(call | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message["result"]
            if events is not None:
                events.append(message)

    def _message(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._in, 2**20)
            assert part, "the browser is gone"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(
        self, page: Path, *, width: int = 1440, height: int = 900, dark: bool = False, at: str = ""
    ) -> Tab:
        """A tab that shows the file. at: what follows # in the address."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.ask(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.ask("Emulation.setEmulatedMedia", features=scheme)
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        tab.ask("Emulation.setDeviceMetricsOverride", **screen)
        tab.ask("Page.navigate", url=page.as_uri() + at)
        tab.until("document.readyState === 'complete'")
        return tab


class Tab:
    """A page that is open. `faults` are exceptions and refusals that the browser reported."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session, self.events = browser, session, list[Any]()

    def ask(self, method: str, **params: Any) -> Any:
        return self.browser.ask(method, self.session, self.events, **params)

    def run(self, code: str) -> Any:
        """Value of an expression; a promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, code: str, seconds: float = 20.0) -> None:
        """Wait until the expression is true; a page may be replaced meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(RuntimeError):
                if self.run(f"!!({code})"):
                    return
            time.sleep(0.02)
        raise AssertionError(f"not in {seconds} s: {code}")

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.ask("Input.dispatchKeyEvent", type="keyDown", **about, **text)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    @property
    def faults(self) -> list[str]:
        self.run("0")  # events before it have come
        names = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in names]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save a screenshot as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
