"""A built site in headless Chromium: what a reader sees, and what the pages do."""
import functools
import http.server
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest


def chromium() -> str:
    """Path of a Chromium; without one the test is skipped, or fails where CDR_REQUIRE_BROWSER=1."""
    named = os.environ.get("CDR_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no browser: install chromium or set CDR_CHROMIUM (looked for {', '.join(names)})"
        if os.environ.get("CDR_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class Browser:
    """Opens pages of one site and keeps what went wrong on them."""

    def __init__(self, page, base: str):
        self.page, self.base = page, base
        self.problems: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(f"{page.url}: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"{page.url}: dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self._check(request.url))
        page.on("response", lambda response: response.status >= 400 and self.problems.append(f"{response.status} {response.url}"))

    def _check(self, url: str) -> None:
        if not url.startswith((self.base, "data:", "blob:")):
            self.problems.append(f"request to {url}")

    def open(self, address: str):
        self.page.goto(self.base + address)
        return self.page

    def search(self, words: str) -> list[str]:
        """Titles of the pages that the site's own search finds."""
        self.open(f"search.html?q={words}")
        self.page.wait_for_selector("#search-results li", timeout=15_000)
        self.page.wait_for_function("!document.querySelector('#search-progress')?.textContent.includes('Searching')")
        return self.page.locator("#search-results li > a").all_inner_texts()

    def shown_images(self) -> list[dict]:
        """Images of the article that were loaded: address, alternative text and size."""
        return self.page.evaluate(
            "() => [...document.querySelectorAll('article img')].map(i => ({src: i.src, alt: i.alt, width: i.naturalWidth, shown: i.clientWidth}))")


@contextmanager
def browse(site: Path):
    """A `Browser` on a folder, served over HTTP, since search reads its pages that way."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as playwright:
            window = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            yield Browser(window.new_page(viewport={"width": 1280, "height": 900}), f"http://127.0.0.1:{server.server_port}/")
            window.close()
    finally:
        server.shutdown()
        server.server_close()
