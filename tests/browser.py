"""Chromium without a window, driven by Playwright, so that pages are looked at as a reader would see them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright import sync_api

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page at a time. `troubles` collects errors of the console, of scripts and of loading."""

    def __init__(self, engine: sync_api.Browser) -> None:
        self._engine = engine
        self.page: sync_api.Page | None = None
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path | str, width: int, height: int = 900, *, dark: bool = False, touch: bool = False) -> None:
        """Open a file or an address in a new window."""
        if self.page is not None:
            self.page.close()
        size: Any = {"width": width, "height": height}
        self.page = self._engine.new_page(
            viewport=size, color_scheme="dark" if dark else "light", is_mobile=touch, has_touch=touch
        )
        self.page.set_default_timeout(240_000)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())

    def _note(self, message: sync_api.ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.troubles.append(message.text)

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def type(self, text: str) -> None:
        """Type into what has the focus, and press Enter."""
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Enter")

    def wait_for(self, script: str) -> None:
        """Wait until a script says something true."""
        self.page.wait_for_function(f"() => {script}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile; it ends with the block."""
    with sync_api.sync_playwright() as driver:
        engine = driver.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield Browser(engine)
        engine.close()
