"""Chromium without a window, driven over its DevTools pipe, so that pages are looked at as a reader would see them."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"


class Browser:
    """One page in one browser. `troubles` collects errors of the console, of scripts and of loading."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self._number, self._pending, self._session = 0, b"", None
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.sent: set[str] = set()

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            chunk = self._in.read(1 << 16)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._pending += chunk
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, found = message.get("method", ""), message.get("params", {})
        self.sent.add(method)
        if method == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.troubles.append(found["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.troubles.append(json.dumps(found["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        self._out.write(json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def attach(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path | str, width: int, height: int = 900, *, dark: bool = False, touch: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.sent.discard("Page.loadEventFired")
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "Page.loadEventFired" not in self.sent:
            self._note(self._message())

    def evaluate(self, script: str) -> Any:
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def type(self, text: str) -> None:
        """Type into what has the focus, and press Enter."""
        self.ask("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **enter)

    def wait_for(self, script: str, seconds: float = 240.0) -> None:
        """Wait until a script says something true."""
        until = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.05)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile; it ends with the block."""
    assert EXECUTABLE is not None
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = f"{FLAGS} --user-data-dir={profile}"
        command = f"exec {EXECUTABLE} {flags} 3<&{from_us} 4>&{to_us} >/dev/null 2>&1"  # pipes at 3 and 4
        process = subprocess.Popen(["/bin/bash", "-c", command], pass_fds=(from_us, to_us))
        os.close(from_us)
        os.close(to_us)
        one = Browser(to_browser, from_browser)
        try:
            one.attach()
            yield one
            with contextlib.suppress(OSError, RuntimeError):
                one._session = None
                one.ask("Browser.close")
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
