"""Every page passes "Run all cells" in a real Jupyter kernel, as readers run it: `nbdev_test` has no kernel, no widgets and no messages.

A cell may take a minute; one that needs longer, a network or a GPU says so and is skipped by itself. Pages with widgets run in the
quick tier, all others in the long one.
"""
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("nbclient") is None, reason="nbclient is not installed")     # Imported where it is used: it takes seconds
NBS = Path(__file__).parent.parent / "nbs"
OFFLINE = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")} | {"no_proxy": "127.0.0.1,localhost"}   # Nobody answers there
WIDGETS = re.compile(r"\blive\(|\bipywidgets\b|\bexplore_live\(")


def pages():
    for path in sorted(NBS.rglob("*.ipynb")):
        code = "".join("".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code")
        yield pytest.param(path, id=path.stem, marks=() if WIDGETS.search(code) else pytest.mark.slow)


@pytest.mark.parametrize("path", list(pages()))
def test_a_page_runs_in_a_kernel(path, monkeypatch):
    import nbclient
    import nbformat
    page, long_tier = nbformat.read(path, as_version=4), "LMCOURSE_SLOW" in os.environ
    if not long_tier: page.cells = [c for c in page.cells if not c.source.startswith("#| bench")]       # They measure; no other cell needs them
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.delenv("LMCOURSE_SLOW", raising=False)
    env = os.environ | OFFLINE | {"IN_TEST": "1"}          # The last cell of a page would export its module anew under the other tests
    client = nbclient.NotebookClient(page, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=env)


def test_a_page_that_fails_is_noticed():
    "A lone surrogate can't be sent to the browser: `nbdev_test` doesn't see that, a kernel does."
    import nbclient
    import nbformat
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.HTML('\\ud800')")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="surrogates"): nbclient.NotebookClient(page, timeout=60, kernel_name="python3").execute()
