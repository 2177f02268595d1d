"""The documentation site of this project, built before by `make docs`, where CDR_SITE names it."""
import os
from pathlib import Path

import pytest

from cdr_lib.core.config import project_root
from cdr_lib.reporting.site import check_site

from .browser import browse

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site() -> Path:
    if not os.environ.get("CDR_SITE"):
        pytest.skip("CDR_SITE is not set: build the site with make docs and set it to _docs")
    folder = project_root() / os.environ["CDR_SITE"]
    assert (folder / "index.html").exists(), f"no site in {folder}: run make docs"
    return folder


def test_real_site_has_every_notebook_and_module(site):
    nbs = project_root() / "nbs"
    for path in nbs.rglob("*.ipynb"):
        if not any(part[0] in "._" for part in path.relative_to(nbs).parts):
            assert (site / path.relative_to(nbs).with_suffix(".html")).exists(), path
    for path in (project_root() / "cdr_lib").rglob("*.py"):
        name = ".".join(path.relative_to(project_root() / "cdr_lib").with_suffix("").parts)
        if "_" != path.name[0] and "__all__ = ['" in path.read_text(encoding="utf-8"):
            assert (site / "api" / f"{name}.html").exists(), name
    assert check_site(site) == []


def test_real_site_in_the_browser(site):
    with browse(site) as browser:
        for path in sorted(site.rglob("*.html")):
            if "_static" not in path.parts:
                page = browser.open(path.relative_to(site).as_posix())
                assert page.locator("h1").count() == 1, path
                assert page.locator("article .cell_output .traceback").count() == 0, path
        assert browser.search("nDCG")
        assert any("Conversation" in title for title in browser.search("Conversation"))
        page = browser.open("api/core.conversation.html")
        assert "class Turn(" in " ".join(page.locator("[id='cdr_lib.core.conversation.Turn']").inner_text().split())
        page = browser.open("core/01_conversation.html")
        assert "<script>alert(1)</script>" in page.locator(".cell_output", has_text="assistant").first.inner_text()
        browser.open("reports/cdr_figures.html")
        images = browser.shown_images()
        assert images and all(image["alt"] and image["width"] > 100 for image in images)
        assert browser.open("reports/cdr_tables.html").locator("article table").count() > 0
        assert browser.problems == []
