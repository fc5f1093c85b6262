"""Make the pictures in docs/images: `python -m benchmarks.screenshots [DIRECTORY]`.

They show `memscale report gpt2-medium --on "RTX 3090"`, and the front page of the documentation, which has one of them,
in a headless chromium (`tools/setup_browser.sh` installs it).
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

from memscale.cli.app import run

ROOT = Path(__file__).parents[1]
COMMAND = ["report", "gpt2-medium", "--on", "RTX 3090"]
PICTURES = {  # by name: width, height and colours of the window
    "report-desktop": (1180, 1340, "light"),
    "report-dark": (1180, 940, "dark"),
    "report-phone": (390, 1500, "light"),
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of the requests."""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory on the loopback device: from a file's address, the site hides its search box."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main(images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_path = Path(directory) / "page.html"
        if code := run([*COMMAND, "-o", str(page_path)]):
            raise SystemExit(code)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scheme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(page_path.as_uri())
            page.wait_for_selector("#memory-planned path")
            if scheme == "dark":
                page.hover("#memory-planned", position={"x": 250, "y": 250})
            page.screenshot(path=images / f"{name}.png")
            page.close()
        site = Path(directory) / "site"
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
        subprocess.run(command, cwd=ROOT, check=True)
        with served(site) as address:
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(address, wait_until="networkidle")
            page.wait_for_selector(".md-search__input", state="visible")
            page.screenshot(path=images / "docs-front-page.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
