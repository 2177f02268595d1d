"""The documentation site in a browser: a small one with everything hostile in it."""
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from cdr_lib.core.collection import TASK_AREAS, Collection
from cdr_lib.core.config import project_root, write_json, write_text
from cdr_lib.core.conversation import Conversation
from cdr_lib.core.layouts import write_cdr
from cdr_lib.reporting.book import SiteError, readme, write_readme
from cdr_lib.reporting.site import build_site, check_site
from cdr_lib.reporting.tables import Table

from .browser import browse

pytestmark = pytest.mark.browser

ATTACK = ("<script>window.hacked=1</script><img src=x onerror=\"window.hacked=2\"> <b>bold</b> a|b `c` *d* "
          "$31.00 - $45.50 \\(x\\) $$y$$ [z](javascript:window.hacked=3)")
SETTINGS = """[DEFAULT]
lib_name = shop_lib
lib_path = shop_lib
nbs_path = nbs
user = someone
repo = shop_lib
branch = main
author = A. Person
title = shop_lib
"""
MODULE = '''"""Prices and how to read them."""

__all__ = ['Price', 'parse_price']

from dataclasses import dataclass


@dataclass
class Price:
    "An amount of money."
    amount: float  # in euro, `<unknown>` never

    def double(self) -> "Price":
        "Twice the price."


def parse_price(
    text: str,  # such as "from $5 | $6"
    strict: bool = True,  # raise on __anything__ else
) -> Price:  # the lower end of a range
    """Read a price.

    Ranges such as $31.00 - $45.50 give their lower end.
    """
'''


def write_notebook(path: Path, *cells) -> None:
    """Cells are texts: Markdown if they begin with `#` and a space, code otherwise."""
    made = [cell if not isinstance(cell, str) else new_markdown_cell(cell) if cell.startswith(("# ", "## ", "Text ")) else new_code_cell(cell)
            for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=made), path)


def small_project(root: Path) -> Path:
    write_text(root / "settings.ini", SETTINGS)
    write_text(root / "shop_lib" / "core" / "price.py", MODULE)
    write_text(root / "LICENSE", "free")
    nbs = root / "nbs"
    shutil.copytree(project_root() / "nbs" / "_static", nbs / "_static")
    write_notebook(nbs / "index.ipynb", "# shop_lib\n> Prices.", "#| echo: false\nfrom IPython.display import Markdown\nMarkdown('| a |\\n|---|\\n| 1 |')",
                   "Text to the [licence](../LICENSE) and the [prices](core/00_price.ipynb#numbers).")
    parameters = new_code_cell("seed = 3")
    parameters.metadata["tags"] = ["parameters"]
    write_notebook(
        nbs / "core" / "00_price.ipynb",
        "# Prices\n> What things cost.",
        "#| default_exp core.price",
        "#| export\nfrom dataclasses import dataclass",
        "## Numbers\n\nA zygomorphic price obeys $p_i \\ge 0$, see `parse_price`, and costs $5 to $6.\n\n$$\\sum_i p_i = 1$$",
        "#| export\ndef parse_price(text, strict=True): return text",
        parameters,
        "#| hide\nsecret_of_the_author = 1",
        "#| eval: false\n1 / 0",
        "#| fig-alt: a rising line\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    )
    write_notebook(
        nbs / "core" / "01_hostile.ipynb",
        "# Hostile\n> Text that wants more than to be read.",
        f"from cdr_lib.core.conversation import Conversation\nattack = {ATTACK!r}\ntalk = Conversation.make('c-1', ('user', attack))\ntalk",
        "from IPython.display import Markdown\nMarkdown(talk._repr_markdown_())",
        "print(attack)",
        "import pandas as pd\npd.DataFrame({'text': [attack]})",
        "from cdr_lib.reporting.tables import Table\nTable(pd.DataFrame({'text': [attack], 'n': [1]}), title=attack)",
    )
    write_notebook(nbs / "tutorials" / "00_start.ipynb", "# Start here\n> First steps.", "print('hello')")
    write_notebook(nbs / "reports" / "cdr_main.ipynb", "# Main table\n> The paper's.", "1 / 0")
    write_notebook(root / "reports" / "sample" / "cdr" / "notebooks" / "main.ipynb", "# Main table\n> The paper's.",
                   new_code_cell("x", outputs=[new_output("stream", name="stdout", text="ran by papermill")]))
    write_notebook(nbs / "reports" / "cdr_grid.ipynb", "# Grid\n> Several runs.", "1 / 0")
    for name in ("one", "two"):
        write_notebook(root / "reports" / "sample" / "cdr" / "notebooks" / f"grid-{name}.ipynb", "# Grid\n> Several runs.",
                       new_code_cell("x", outputs=[new_output("stream", name="stdout", text=f"run {name}")]))
    folder = root / "reports" / "sample" / "cdr" / "tables"
    table = Table(pd.DataFrame({"item": ["kettle", "a|b <i>x</i>"], "price": ["$31.00 - $45.50", "$5"]}), title=f"Prices {ATTACK}", note=ATTACK)
    write_text(folder / "prices.md", table.to_markdown())
    write_text(folder / "prices.csv", table.to_csv())
    write_json(folder / "prices.json", {"kind": "table", "title": table.title, "note": ATTACK, "sources": []})
    tasks = [{"task": name, "job": name.partition("-")[0], "source": f"nbs/reports/cdr_{name.partition('-')[0]}.ipynb",
              "notebook": f"reports/sample/cdr/notebooks/{name}.ipynb", "status": "ok", "seconds": 1.5, "parameters": {"text": ATTACK},
              "outputs": {}} for name in ("main", "grid-one", "grid-two")]
    write_json(root / "reports" / "sample" / "manifest.json", {"profile": "sample", "python": "3.11", "tasks": tasks})
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return build_site(root=small_project(tmp_path_factory.mktemp("shop"))).parent


@pytest.fixture(scope="module")
def browser(small):
    with browse(small) as found:
        yield found


def test_every_page_opens_without_errors_or_foreign_requests(small, browser):
    browser.problems.clear()
    addresses = sorted(path.relative_to(small).as_posix() for path in small.rglob("*.html") if "_static" not in path.parts)
    assert {"index.html", "core/00_price.html", "api/core.price.html", "reports/cdr_tables.html", "reports/provenance.html"} <= set(addresses)
    for address in addresses:
        browser.open(address)
        assert browser.page.locator("h1").count() == 1, address
    browser.page.wait_for_timeout(200)
    assert browser.problems == []


def test_pages_stand_in_reading_order_with_menus(browser):
    page = browser.open("index.html")
    assert page.locator(".bd-navbar-elements .nav-link").first.inner_text() == "Tutorials"
    # The licence is no page: the link leads to the repository. The notebook is one.
    links = {link.inner_text(): link.get_attribute("href") for link in page.locator("article p a").all()}
    assert links["licence"] == "https://github.com/someone/shop_lib/blob/main/LICENSE"
    assert links["prices"] == "core/00_price.html#numbers"
    assert page.locator("article table td").first.inner_text() == "1"
    page = browser.open("core/00_price.html")
    assert page.locator(".bd-sidebar-primary .bd-docs-nav a").all_inner_texts() == ["Core", "Prices", "Hostile"]
    assert page.locator("#pst-page-toc-nav a, .page-toc a").first.inner_text() == "Numbers"


def test_a_notebook_page_shows_what_its_directives_say(browser):
    page = browser.open("core/00_price.html")
    text = page.locator("article").inner_text()
    assert "secret_of_the_author" not in text and "#|" not in text
    assert "1 / 0" in text and "ZeroDivisionError" not in text
    assert "parameters, set by papermill" in text
    assert page.locator("article details").count() == 1  # the imports
    # A name in prose leads to its entry, and so does the tab above the cell that defines it.
    for link in (page.locator("article p a", has_text="parse_price"), page.locator(".cell-tab a", has_text="parse_price")):
        assert link.first.get_attribute("href").endswith("api/core.price.html#shop_lib.core.price.parse_price")


def test_figures_and_formulas_are_visible(browser):
    page = browser.open("core/00_price.html")
    image, = browser.shown_images()
    assert image["alt"] == "a rising line" and image["width"] > 100 and image["shown"] > 100
    page.wait_for_selector("mjx-container svg")
    # One inline, one displayed; the price range in the same paragraph is text.
    assert page.locator("mjx-container").count() == 2
    assert "costs $5 to $6" in page.locator("article").inner_text()


def test_search_finds_a_word_and_a_name(browser):
    browser.problems.clear()
    assert browser.search("zygomorphic") == ["Prices"]
    assert any("parse_price" in title for title in browser.search("parse_price"))
    assert browser.problems == []


def test_an_api_entry_has_signature_parameters_and_source(small, browser):
    page = browser.open("api/core.price.html")
    entry = page.locator("dl.py.function", has=page.locator("[id='shop_lib.core.price.parse_price']"))
    assert "".join(entry.locator("dt").first.inner_text().split()).startswith("parse_price(text:str,strict:bool=True)→Price")
    assert entry.locator("dt a", has_text="Price").get_attribute("href") == "#shop_lib.core.price.Price"
    rows = [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in entry.locator("tbody tr").all()]
    assert rows == [["text", "str", "", 'such as "from $5 | $6"'], ["strict", "bool", "True", "raise on __anything__ else"],
                    ["returns", "Price", "", "the lower end of a range"]]
    assert "Ranges such as $31.00 - $45.50 give" in entry.inner_text()
    line = MODULE[:MODULE.index("def parse_price")].count("\n") + 1
    assert entry.locator("a", has_text="source").get_attribute("href") == f"https://github.com/someone/shop_lib/blob/main/shop_lib/core/price.py#L{line}"
    assert "core/00_price.html#" in entry.locator("a", has_text="notebook").get_attribute("href")
    assert page.locator("dl.py.class dl.py.method dt").inner_text().startswith("double()")


def test_conversation_text_is_shown_and_never_run(browser):
    browser.problems.clear()
    for address, times in (("core/01_hostile.html", 5), ("reports/cdr_tables.html", 2), ("reports/provenance.html", 1)):
        page = browser.open(address)
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        text = " ".join(page.locator("article").inner_text().split())
        assert text.count(" ".join(ATTACK.split())) >= times, address
        assert page.locator("article script, article mjx-container, article i, article img").count() == 0
    assert browser.problems == []


def test_a_report_page_shows_the_run_of_papermill(browser):
    assert "ran by papermill" in browser.open("reports/cdr_main.html").locator("article").inner_text()
    # With several sets of parameters there is a page for each run.
    for address, name in (("reports/cdr_grid.html", "one"), ("reports/cdr_grid-two.html", "two")):
        page = browser.open(address)
        assert f"run {name}" in page.locator("article").inner_text() and page.locator("h1").inner_text().startswith(f"Grid ({name})")


def test_a_site_is_built_again_from_the_cache_and_replaced_only_by_a_sound_one(small, tmp_path):
    root = small.parent
    before = (small / "core" / "00_price.html").read_bytes()
    executed = {path: path.stat().st_mtime_ns for path in (root / ".cache" / "site" / "executed").iterdir()}
    assert len(executed) == 3  # neither the report nor the index
    bad = root / "nbs" / "core" / "02_bad.ipynb"
    try:
        write_notebook(bad, "# Bad\n> Page.", "Text with a [link](nowhere.ipynb).")
        with pytest.raises(SiteError, match="nowhere.ipynb"):
            build_site(root=root)
        write_notebook(bad, "# Bad\n> Page.", "Text with a [link](#nowhere).")
        with pytest.raises(SiteError, match="nowhere"):
            build_site(root=root)
    finally:
        bad.unlink()
    assert (small / "core" / "00_price.html").read_bytes() == before and check_site(small) == []
    assert {path: path.stat().st_mtime_ns for path in executed} == executed


def test_active_output_is_refused(tmp_path):
    bad = {
        "<script>window.hacked=1</script>": "<script> in the article",
        "<p onclick='x()'>1</p>": "onclick= on <p>",
        "<img src='https://example.org/pixel.png'>": "fetches https://example.org/pixel.png",
        "<a href='javascript:x()'>1</a>": "javascript: address",
        "<iframe srcdoc='1'></iframe>": "<iframe> in the article",
    }
    write_text(tmp_path / "settings.ini", SETTINGS)
    write_notebook(tmp_path / "nbs" / "index.ipynb", "# Index")
    cells = [new_code_cell("x", outputs=[new_output("display_data", data={"text/html": text})]) for text in bad]
    write_notebook(tmp_path / "nbs" / "core" / "00_bad.ipynb", "# Bad", *cells)
    with pytest.raises(SiteError) as error:
        build_site(root=tmp_path, execute=False)
    assert [problem for problem in bad.values() if problem not in str(error.value)] == []
    assert not (tmp_path / "_docs").exists()


def test_readme_is_rendered_from_the_index(tmp_path):
    root = small_project(tmp_path)
    text = readme(root)
    assert text.splitlines()[:2] == ["# shop_lib", "> Prices."] and "| 1 |" in text and "IPython" not in text
    assert "[licence](LICENSE)" in text and "[prices](nbs/core/00_price.ipynb#numbers)" in text
    path = write_readme(root)
    stamp = path.stat().st_mtime_ns
    assert write_readme(root).stat().st_mtime_ns == stamp and path.read_text() == text


def test_readme_is_current():
    assert (project_root() / "README.md").read_text(encoding="utf-8") == readme(), "nbs/index.ipynb changed: run make nbs"


def test_the_python_example_of_the_readme_runs(tmp_path, monkeypatch):
    text = (project_root() / "README.md").read_text(encoding="utf-8")
    example, = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "read_collection" in block)
    talks = {f"c{i}": Conversation.make(f"c{i}", ("user", word), ("assistant", "fine"), ("user", "thanks"), ("assistant", "bye"))
             for i, word in enumerate(("a red kettle", "a blue bag", "a slow train"))}
    queries = {"q1": "red kettle", "q2": "slow train"}
    write_cdr(Collection("my", talks, queries, {"q1": {"c0": 1}, "q2": {"c2": 1}}, {name: TASK_AREAS[0] for name in queries}), tmp_path / "my_logs")
    monkeypatch.chdir(tmp_path)
    # The last line is the experiment; the hash encoder stands in for MiniLM to save the seconds of loading it.
    lines = example.strip().replace('"minilm"', '"hash"').splitlines()
    names = {}
    exec("\n".join([*lines[:-1], f"result = {lines[-1]}"]), names)
    table = names["result"].summary()
    assert len(table.query("measure == 'nDCG@10'")) == 4
    assert table.query("system == 'BM25' and measure == 'nDCG@10'").value.item() == 1
