"""Run one page by clicks in JupyterLab, as a reader does, and look at what came out. Usage: tools/check_lab.py [nbs/01_x.ipynb]

Opens the page in a Chromium, chooses "Run All Cells", waits until the kernel rests, and fails on a cell that ended in an error and on one
that never ran. Works on a copy: the page itself stays as it is. Needs Playwright and a Chromium;
without them it says so.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, time
import urllib.error, urllib.request
from pathlib import Path

from check_site import FLAGS, chromium

ROOT, PORT, MINUTES = Path(__file__).resolve().parent.parent, 8897, 5


def serve(folder):
    "JupyterLab over `folder`, without a password, for this machine alone: the process, once it answers."
    words = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={PORT}", "--IdentityProvider.token=", f"--notebook-dir={folder}",
             "--ServerApp.allow_root=True", "--LabApp.news_url=", "--ip=127.0.0.1"]
    env = os.environ | {"PYTHONPATH": str(folder.parent), "JUPYTER_CONFIG_DIR": str(folder / ".jupyter")}
    env.pop("LMCOURSE_SLOW", None)
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(240):
        try: urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api", timeout=5).close(); return process
        except (urllib.error.URLError, OSError): time.sleep(.5)
    process.kill()
    sys.exit("JupyterLab does not answer")


def run_all(page, folder, name):
    "Click through the page `name` of `folder`, save it until every cell has run; what is wrong with it, as a list."
    path = folder / name
    page.goto(f"http://127.0.0.1:{PORT}/lab/tree/{name.as_posix()}", timeout=120_000)
    page.locator(".jp-CodeCell").first.wait_for(timeout=120_000)
    page.get_by_text("| Idle").wait_for(timeout=120_000)                # The kernel, in the bar below
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    end, faults = time.time() + 60*MINUTES, ["nothing was saved"]
    while faults and time.time() < end:
        time.sleep(3)
        page.keyboard.press("Control+s")
        try: errors, faults = found_errors(path), not_run(path)
        except json.JSONDecodeError: continue                           # It is being written at this moment
        if errors: return errors
    return faults


def code_cells(path):
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]


def found_errors(path):
    "The errors that the saved page shows."
    return [f"a cell ended in {o['ename']}: {o['evalue'][:300]}" for c in code_cells(path) for o in c["outputs"] if o["output_type"] == "error"]


def not_run(path):
    "How many cells of the saved page have not ended, as a list of one line; empty if all have."
    cells = code_cells(path)
    left = sum(c["execution_count"] is None for c in cells)
    return [f"{left} of {len(cells)} cells have not run after {MINUTES} minutes at most"] if left else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=next((ROOT / "nbs").rglob("01f_explorer.ipynb")), help="a notebook")
    args = parser.parse_args()
    try: from playwright.sync_api import sync_playwright
    except ImportError: return print("skipped: no playwright")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="lmcourse-lab-") as tmp:
        if not (browser := chromium(playwright)): return print("skipped: no Chromium")
        project, page_ = Path(tmp).resolve() / "lmcourse", args.page.resolve().relative_to(ROOT / "nbs")
        for name in ("lmcourse", "nbs"): shutil.copytree(ROOT / name, project / name, symlinks=True)
        shutil.copy(ROOT / "settings.ini", project)                  # The last cell of a page exports its module
        server = serve(project / "nbs")
        try:
            page = playwright.chromium.launch(executable_path=browser, args=FLAGS).new_page(viewport=dict(width=1400, height=1000))
            faults = run_all(page, project / "nbs", page_)
        finally: server.terminate(); server.wait()
    if faults: sys.exit(f"{args.page.name} in JupyterLab:\n  " + "\n  ".join(faults))
    print(f"{args.page.name} runs in JupyterLab")


if __name__ == "__main__": main()
