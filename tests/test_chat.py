"The page `/chat` in a real browser: it streams, stops, remembers if asked to, shows what goes wrong, and can be read and used by everyone."
import re
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import wait_for

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from lmcourse.app import cli, generation_commands
from lmcourse.app.serve import Service, make_server
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.generation.generate import ChatTemplate, complete
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig

TOKENIZER = Tokenizer.train(["the cat sat on the mat, the dog sat on the cat. Ella the mule, an orange cap: " * 3], 280)
MODEL = TransformerLM(ModelConfig(vocab_size=TOKENIZER.vocab_size, context_length=256, d_model=32, num_layers=1, num_heads=2, d_ff=64), 1).eval()
AS_IT_IS = ChatTemplate(dict(user=("", ""), assistant=("", "")), "")
BRIEF = "Ella the mule, an orange cap:"


@pytest.fixture(scope="module")
def served():
    service = Service(MODEL, TOKENIZER, name="tiny", chat_template=AS_IT_IS, max_tokens=20)
    server = make_server(service, "localhost", 0, grace=1.)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    yield service, f"http://localhost:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def test_the_page_is_one_file_that_may_load_nothing_else(served):
    with urllib.request.urlopen(f"{served[1]}/chat") as reply: page, policy = reply.read().decode(), reply.headers["content-security-policy"]
    assert reply.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"https?:|src=|@import|url\(", page) and len(page) < 20_000


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    import check_site
    with playwright.sync_playwright() as p:
        if not (path := check_site.chromium(p)): pytest.skip("there is no Chromium on this machine")
        browser = p.chromium.launch(executable_path=path, args=check_site.FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    import check_site
    page, faults = browser.new_page(), []
    check_site.listen(page, faults)
    page.goto(f"{served[1]}/chat")
    page.locator("#name", has_text="tiny").wait_for()
    yield page
    page.close()
    assert not faults, faults


def cold(page): page.evaluate("document.querySelector('#temperature').value = 0; document.querySelector('#temperature').oninput()")
def ended(page):
    page.locator("#state", has_text="pieces").wait_for()
    page.locator("#send", has_text="Send").wait_for()


def said(page, role): return page.locator(f".{role} p").all_inner_texts()


def test_a_message_from_the_keyboard_is_answered_as_by_the_model(page):
    cold(page)
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type(BRIEF)
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#text") == BRIEF + "\n"
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    ended(page)
    assert said(page, "user") == [BRIEF] and page.input_value("#text") == ""
    assert page.locator(".assistant p").first.text_content() == complete(MODEL, TOKENIZER, BRIEF, 20, temperature=0).lstrip()


def test_examples_are_a_click_and_the_conversation_is_sent_if_wanted(page):
    cold(page)
    bodies = []
    page.on("request", lambda r: r.method == "POST" and bodies.append(r.post_data_json))
    page.locator("#examples button").first.click()
    ended(page)
    page.locator("#examples button").nth(1).click()
    page.locator(".assistant").nth(1).wait_for()
    ended(page)
    page.check("#memory")
    page.fill("#text", "the dog")
    page.click("#send")
    page.locator(".user").nth(2).wait_for()
    page.locator("#send", has_text="Send").wait_for()
    assert [len(b["messages"]) for b in bodies] == [1, 1, 5] and all(b["stream"] and b["temperature"] == 0 for b in bodies)
    assert [m["role"] for m in bodies[2]["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    page.click("#clear")
    assert not said(page, "user") and page.evaluate("said.length") == 0


@contextmanager
def held_engine(worker):
    "An engine that waits after some tokens until another call comes from outside."
    engine, go, steps = worker.engine, threading.Event(), []
    step = type(engine).step
    def held():
        if len(steps) >= 6: wait_for(lambda: go.is_set() or not worker.inbox.empty())
        steps.append(1)
        return step(engine)
    engine.step = held
    try: yield
    finally:
        go.set()
        del engine.step


def test_text_appears_while_it_is_written_and_can_be_stopped(page, served):
    "The engine is held after some tokens: what is there is seen, and Escape ends the rest of it in the engine too."
    worker = served[0].worker
    with held_engine(worker):
        cold(page)                                  # A draw could end the reply before it is held
        page.fill("#text", "the cat")
        page.click("#send")
        page.locator(".assistant p", has_text=re.compile(".{4}")).wait_for()
        assert page.locator("#send").inner_text() == "Stop" and page.locator("#state").inner_text() == "writing"
        page.keyboard.press("Escape")
        page.locator("#state", has_text="stopped").wait_for()
        wait_for(lambda: not worker.jobs and not worker.open)
        assert page.locator("#send").inner_text() == "Send" and len(said(page, "assistant")) == 1


def test_what_is_cleared_while_it_is_written_is_not_remembered(page, served):
    "The part of the reply that was there once became the first message of the next conversation."
    worker = served[0].worker
    with held_engine(worker):
        cold(page)
        page.fill("#text", "the cat")
        page.click("#send")
        page.locator(".assistant p", has_text=re.compile(".{4}")).wait_for()
        page.click("#clear")
        page.locator("#send", has_text="Send").wait_for()
        wait_for(lambda: not worker.jobs and not worker.open)
    assert page.evaluate("said.length") == 0 and not said(page, "user") and not said(page, "assistant")


def test_what_goes_wrong_is_said_and_the_next_message_works(browser, served):
    "A message that the context is too short for. (The browser itself notes the status 400 in its console.)"
    page = browser.new_page()
    page.goto(f"{served[1]}/chat")
    page.locator("#name", has_text="tiny").wait_for()
    cold(page)                                      # A draw could end the reply before its first letter
    page.fill("#text", "the cat sat "*200)
    page.click("#send")
    page.wait_for_selector(".error")
    assert "context" in said(page, "error")[0] and not said(page, "assistant") and page.evaluate("said.length") == 0
    page.fill("#text", "<b>the</b> cat")
    page.keyboard.press("Enter")
    ended(page)
    assert said(page, "user")[1] == "<b>the</b> cat" and len(said(page, "assistant")) == 1, "text stays text"
    page.close()


def test_a_reply_without_text_is_said_and_not_remembered(page):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n"))
    page.locator("#examples button").first.click()
    ended(page)
    assert "before it wrote anything" in said(page, "error")[0] and not said(page, "assistant") and page.evaluate("said.length") == 0


def test_it_can_be_read_and_tapped_by_day_by_night_and_on_a_phone(page):
    import check_site
    page.locator("#examples button").first.click()
    ended(page)
    page.evaluate("show('error', 'what goes wrong looks like this')")
    page.set_viewport_size(check_site.WIDE)
    faults = page.evaluate(check_site.AUDIT, dict(structure=True, contrast=True))
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    faults += page.evaluate(check_site.AUDIT, dict(contrast=True))
    page.set_viewport_size(check_site.PHONE)
    faults += page.evaluate(check_site.AUDIT, dict(phone=True))
    assert not faults, faults
    box = page.locator("#text").bounding_box()
    assert box["y"] + box["height"] < check_site.PHONE["height"], "the message box is on the screen"


def test_the_command_says_where_the_page_is(monkeypatch, capsys):
    from lmcourse.app import serve
    monkeypatch.setattr(serve, "run_server", lambda service, host, port, ready, *more: (ready(), service.worker.close()))
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(generation_commands, "_has_screen", lambda: True)
    for words, n in (["chat", "--port", "8765"], 1), (["chat", "--port", "8765", "--no-browser"], 1), (["serve", "--port", "8765"], 1):
        cli.main(words)
        assert "http://127.0.0.1:8765/chat" in capsys.readouterr().out and len(opened) == n


def test_mistakes_are_one_line(capsys):
    for words, said in ((["chat", "nowhere"], "nowhere"), (["chat", "--port", "0"], "port = 0")):
        with pytest.raises(SystemExit) as e: cli.main(words)
        error = capsys.readouterr().err
        assert e.value.code == 2 and said in error and error.count("\n") == 1
