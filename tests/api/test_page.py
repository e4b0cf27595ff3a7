"""The built-in page: what the server says of it, and what people do with it in a real browser (headless Chromium)."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from kit import GatedRunner, Rig, ScriptedRunner, byte_tokenizer, wait_until
from live import LiveServer
from playwright.sync_api import expect, sync_playwright
from scripted import LIMITS, MARKS, TEMPLATE, TOOLS, Script

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("TIERCEL_SCREENSHOTS")  # a folder: where pictures for docs/ are written
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'

expect.set_options(timeout=20_000)  # a busy machine's browser is slow

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")


def test_the_page_is_one_document_that_fetches_nothing(rig):
    response = rig.ask("GET", "/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", response.text)
    assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in response.text
    assert "innerHTML" not in response.text


def test_without_a_ui_there_is_no_page(make_rig):
    assert make_rig(settings={"has_page": False}).ask("GET", "/").status_code == 404


def test_without_a_key_the_page_comes_with_401_and_holds_nothing_of_the_server(make_rig):
    rig = make_rig(settings={"api_keys": ("secret",)})
    response = rig.ask("GET", "/")
    assert response.status_code == 401
    assert "<title>Tiercel</title>" in response.text
    assert "tiny" not in response.text
    assert rig.ask("GET", "/", headers={"authorization": "Bearer secret"}).status_code == 200
    assert rig.ask("POST", "/").status_code == 401
    closed = make_rig(settings={"api_keys": ("secret",), "has_page": False}).ask("GET", "/")
    assert (closed.status_code, closed.headers["content-type"]) == (401, "application/json")


# In a browser.


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Serve a rig and open its page; every error the page makes fails the test."""
    opened = []

    def visit(rig, *, width=1000, height=800, status=200):
        server = LiveServer(rig)
        context = browser.new_context(viewport={"width": width, "height": height}, base_url=server.url)
        context.set_default_timeout(20_000)
        page = context.new_page()
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        opened.append((server, context, faults, requests))
        response = page.goto("/")
        assert response.status == status
        return page

    yield visit
    for server, context, faults, requests in opened:
        context.close()
        server.close()
        server.rig.close()
        assert faults == []
        assert all(url.startswith((server.url, "data:")) for url in requests), "the page fetched from elsewhere"


def speaking(text, kind=ScriptedRunner, *, special=(), template=TEMPLATE, settings=None):
    """A model that says a text, behind the server."""
    tokenizer = byte_tokenizer(template, special)
    script = tokenizer.encode(text, add_special_tokens=False)
    return Rig(
        runner=lambda limits: kind(limits, script=script),
        tokenizer=lambda: tokenizer,
        limits=LIMITS,
        settings={"port": 0} | (settings or {}),
    )


class Gated(GatedRunner, Script):
    """Says its text as far as it is let."""


def shot(page, name):
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def send(page, text):
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")


def answers(page):
    return page.locator("article.assistant")


@needs_browser
def test_an_answer_is_streamed_and_told_with_its_speed(visit):
    rig = speaking("Good evening, <b>friend</b>.", Gated)
    page = visit(rig)
    rig.runner.let(5)
    send(page, "hello")
    expect(answers(page).locator(".text")).to_have_text(re.compile("^Go"))
    assert page.get_by_role("button", name="Stop").is_visible()
    assert answers(page).locator(".note").count() == 0
    rig.runner.open()
    answers(page).locator(".note").wait_for()
    assert answers(page).locator(".text").text_content() == "Good evening, <b>friend</b>."
    assert "29 tokens" in answers(page).locator(".note").text_content()
    assert page.locator("#text").input_value() == ""


@needs_browser
def test_stop_ends_the_answer_and_frees_the_engine(visit):
    rig = speaking("x" * 500, Gated)
    page = visit(rig)
    rig.runner.let(10)
    send(page, "hello")
    expect(answers(page).locator(".text")).to_have_text(re.compile("^x{4}"))
    page.keyboard.press("Escape")
    answers(page).locator(".note").wait_for()
    assert answers(page).locator(".note").text_content() == "stopped"
    rig.runner.open()
    rig.assert_idle()
    assert rig.core.snapshot.n_total_generation_tokens < 100
    assert page.get_by_role("button", name="Send").is_visible()


@needs_browser
def test_regenerate_asks_again_in_place_of_the_answer(visit):
    page = visit(speaking("Yes."))
    send(page, "well?")
    answers(page).locator(".note").wait_for()
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).locator(".note")).to_have_count(1)
    assert answers(page).count() == 1
    assert page.locator("article.user").count() == 1
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0


@needs_browser
def test_reasoning_and_calls_are_folded_and_a_result_goes_on(visit):
    page = visit(speaking(f"<think>They ask for rain.</think>{CALL}", special=MARKS))
    page.locator("#settings summary").click()
    page.get_by_label("Tools, a JSON list").fill(json.dumps(TOOLS))
    page.locator("#settings summary").click()
    send(page, "weather?")
    answers(page).locator(".note").wait_for()
    folds = answers(page).locator("details")
    assert folds.count() == 2
    assert folds.evaluate_all("all => all.every((one) => !one.open)")
    assert folds.nth(0).locator("summary").text_content() == "Reasoning"
    assert folds.nth(0).locator("pre").text_content() == "They ask for rain."
    assert folds.nth(1).locator("summary").text_content() == "Call of get_weather"
    assert json.loads(folds.nth(1).locator("pre").text_content()) == {"city": "Oslo"}
    shot(page, "page-tools")
    page.get_by_label("Result of get_weather").fill("rain")
    page.keyboard.press("Enter")
    expect(answers(page).locator(".note")).to_have_count(2)
    assert page.locator("article.tool .text").text_content() == "rain"


@needs_browser
def test_a_tokens_probability_is_told_on_hover_and_on_focus(visit):
    page = visit(speaking("Blue."))
    page.locator("#settings summary").click()
    page.get_by_label("Token probabilities").check()
    page.locator("#settings summary").click()
    send(page, "colour?")
    answers(page).locator(".note").wait_for()
    tokens = answers(page).locator(".token")
    assert "".join(tokens.all_text_contents()) == "Blue."
    tokens.nth(1).hover()
    assert re.search(r'\d %  "l"', page.get_by_role("tooltip").text_content())
    shot(page, "page-probabilities")
    page.keyboard.press("Escape")
    assert page.get_by_role("tooltip").count() == 0
    tokens.nth(2).focus()
    assert '"u"' in page.get_by_role("tooltip").text_content()


@needs_browser
def test_settings_reach_the_server_and_wrong_ones_are_told(visit):
    page = visit(speaking("Yes."))
    page.locator("#settings summary").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Most tokens").fill("2")
    page.get_by_label("System message").fill("Be brief.")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "well?")
    body = asked.value.post_data_json
    assert (body["temperature"], body["max_tokens"]) == (0.5, 2)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    answers(page).locator(".note").wait_for()
    assert "cut" in answers(page).locator(".note").text_content()
    page.get_by_label("Temperature").fill("5")
    send(page, "again")
    assert "temperature" in page.get_by_role("alert").text_content()
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Tools, a JSON list").fill("{")
    page.get_by_role("button", name="Regenerate").click()
    assert page.get_by_role("alert").text_content().startswith("Tools:")


@needs_browser
def test_the_servers_refusal_is_shown_as_it_was_said(visit):
    page = visit(speaking("Yes."))
    send(page, "x" * 5000)
    page.get_by_role("alert").wait_for()
    assert "tokens" in page.get_by_role("alert").text_content()
    assert answers(page).count() == 0


@needs_browser
def test_a_key_is_asked_for_refused_and_used(visit):
    page = visit(speaking("Yes.", settings={"api_keys": ("open sesame",)}), status=401)
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("That key is not one of this server's.").wait_for()
    field.fill("open sesame")
    page.keyboard.press("Enter")
    page.locator("#text").wait_for()
    send(page, "well?")
    answers(page).locator(".note").wait_for()
    assert answers(page).locator(".text").text_content() == "Yes."


@needs_browser
def test_the_engines_numbers_are_live(visit):
    page = visit(speaking("Yes."))
    send(page, "well?")
    answers(page).locator(".note").wait_for()
    page.get_by_role("button", name="Engine").click()
    page.locator("#times tr").first.wait_for()
    first = page.locator("#times tr").first
    assert first.locator("td").first.text_content() == "First token"
    assert first.locator("td").last.text_content() == "1"
    assert re.search(r"\d (ms|s)", first.locator("td").nth(1).text_content())
    shown = dict(zip(page.locator("dt").all_text_contents(), page.locator("dd").all_text_contents(), strict=True))
    assert shown["Running"] == "0"
    assert shown["Pages cached"].endswith(f"of {LIMITS['n_pages']}")
    expect(page.locator("#curve path")).to_have_attribute("d", re.compile("L"))
    shot(page, "page-engine")


@needs_browser
def test_everything_is_reached_by_the_keyboard(visit):
    page = visit(speaking("Yes."))
    page.locator("#text").wait_for()
    seen = set()
    page.keyboard.press("Escape")
    page.locator("body").focus()
    page.evaluate("document.activeElement.blur()")
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"model", "show-chat", "show-engine", "SUMMARY", "log", "text", "send"} <= seen


@needs_browser
def test_a_phone_shows_it_without_scrolling_sideways(visit):
    page = visit(speaking("A longer answer, " * 20), width=360, height=640)
    send(page, "tell me")
    answers(page).locator(".note").wait_for()
    shot(page, "page-phone")
    for name in ("Chat", "Engine"):
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    page.get_by_role("button", name="Chat", exact=True).click()
    assert page.get_by_role("button", name="Send").bounding_box()["height"] >= 38


@needs_browser
def test_leaving_the_page_frees_the_engine(visit):
    rig = speaking("x" * 500, Gated)
    page = visit(rig)
    rig.runner.let(5)
    send(page, "hello")
    expect(answers(page).locator(".text")).to_have_text(re.compile("^xx"))
    page.goto("about:blank")
    rig.runner.open()
    wait_until(lambda: rig.snapshot_is_idle)
