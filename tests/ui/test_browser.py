"""The page in a real browser over a scripted engine. (Kinds: H01, H02, H05.)

What happens is asserted on the engine's own numbers; of the page, on what a person reads. Screenshots are left in .ci-output/ui.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import wait_until

Serve, Visit = Callable[..., Any], Callable[..., Any]


def test_a_conversation_fills_blocks_and_the_next_turn_finds_them(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    tab.ask("hello one")
    wait_until(served.is_idle)
    assert served.header()["cached"] > 0  # what it computed stays reusable
    assert re.search(r"tok/s · TTFT .* · 0 % of prompt cached · context \d+ of 4096 · stop", tab.stats())
    tab.ask("hello two")
    cached = re.search(r"(\d+) % of prompt cached", tab.stats())
    assert cached is not None
    assert int(cached[1]) > 50
    assert "assistant: Hello there.\nuser: hello two" in model.prompts[-1]  # the raw answer, as it was


def test_two_visitors_with_the_same_start_share_blocks_and_see_only_their_own(serve: Serve, visit: Visit) -> None:
    served = serve()
    one, two = visit(served.url), visit(served.url)
    one.send("a story, said the first")
    served.until(lambda header: header["running"] == 1)
    two.send("a story, said the second")
    served.until(lambda header: header["running"] == 2 and header["shared"] > 0)
    two.page.get_by_text("shared, not computed again").first.wait_for()
    assert one.page.get_by_text("said the second").count() == 0
    assert two.page.get_by_text("said the first").count() == 0
    for tab in (one, two):
        tab.page.get_by_role("button", name="Stop", exact=True).click()
        tab.answered()
    wait_until(served.is_idle)


def test_stop_frees_the_blocks_keeps_the_text_and_the_next_message_works(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    tab.send("a story")
    tab.page.get_by_text("Once upon a time").wait_for()
    assert served.header()["held"] > 0
    tab.page.get_by_role("button", name="Stop", exact=True).click()
    tab.answered()
    wait_until(served.is_idle)
    assert "stopped" in tab.stats()
    assert tab.page.get_by_text("Once upon a time").count() == 1
    tab.ask("hello")
    assert "assistant: Once upon a time" in model.prompts[-1]


def test_a_closed_tab_s_request_ends_while_running_and_while_waiting(serve: Serve, visit: Visit) -> None:
    served = serve(options={"max_num_sequences": 1})
    running, waiting = visit(served.url), visit(served.url)
    running.send("a story")
    served.until(lambda header: header["running"] == 1)
    waiting.send("a story, too")
    served.until(lambda header: header["waiting"] == 1)
    waiting.page.get_by_text(re.compile(r"waiting")).first.wait_for()
    waiting.page.close()
    served.until(lambda header: header["waiting"] == 0 and header["running"] == 1)
    running.page.close()
    wait_until(served.is_idle)


def test_a_tiny_pool_pushes_somebody_out_and_both_finish(serve: Serve, visit: Visit, model: Any) -> None:
    model.answers["tale"], model.pause = "All was well. " * 12, 0.05
    served = serve(options={"num_blocks": 34})  # each needs 31, of which 18 can be shared
    one, two = visit(served.url), visit(served.url)
    one.send("tale one")
    two.send("tale two")
    served.until(lambda header: header["running"] == 2)
    model.pause = 0.002
    one.answered()
    two.answered()
    wait_until(served.is_idle)
    assert served.header()["preemptions"] > 0
    one.page.get_by_text(re.compile("^.?Pool full: Chat")).first.wait_for()
    for tab in (one, two):
        assert "All was well. All was well." in tab.page.get_by_test_id("bot").first.inner_text()
        assert "stop" in tab.stats()


def test_code_survives_and_markup_is_inert(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    question = "code:\n    if a < b:\n        print('<script>window.hacked = 2</script>')"
    tab.ask(question)
    asked = tab.page.get_by_test_id("user").first.locator("code").inner_text()
    assert asked.rstrip("\n") == question
    answered = tab.page.get_by_test_id("bot").first
    assert answered.locator("pre code").inner_text().rstrip("\n") == 'def f(x):\n    if x < 1 and x > 0:\n        return "<b>"'
    assert "<script>window.hacked = 1</script> <i>" in answered.inner_text()
    assert tab.page.evaluate("window.hacked === undefined")
    tab.ask("hello again")
    assert f"user: {question}\nassistant: {model.answers['code']}\nuser: hello again" in model.prompts[-1]


def test_retry_undo_and_clear_change_what_the_model_is_told(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    tab.ask("hello one")
    tab.ask("hello two")
    before = len(model.prompts)
    tab.page.get_by_role("button", name="Retry").last.click()
    wait_until(lambda: len(model.prompts) > before)
    tab.answered()
    assert model.prompts[-1].count("user: ") == 2
    assert model.prompts[-1] == model.prompts[-2]
    tab.page.get_by_role("button", name="Undo").last.click()
    tab.page.wait_for_function("document.querySelector('#message textarea').value === 'hello two'")
    tab.ask("hello three")
    assert "hello three" in model.prompts[-1]
    assert "hello two" not in model.prompts[-1]
    tab.page.get_by_role("button", name="Clear").click()
    wait_until(lambda: tab.page.get_by_test_id("bot").count() == 0)
    tab.ask("hello four")
    assert model.prompts[-1].count("user: ") == 1


def test_an_edited_question_is_asked_as_it_was_typed(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    tab.ask("hello <b>one</b> & two")
    tab.ask("hello again")
    tab.page.get_by_role("button", name="Edit").first.click()
    editor = tab.page.locator("#chat textarea")
    assert editor.bounding_box()["height"] >= 96  # several lines of a question can be read
    assert "one" in editor.input_value()
    editor.fill(editor.input_value().replace("one", "three"))
    before = len(model.prompts)
    tab.page.get_by_role("button", name="Submit").click()
    wait_until(lambda: len(model.prompts) > before)
    tab.answered()
    assert model.prompts[-1].endswith("user: hello <b>three</b> & two\nassistant: ")
    assert model.prompts[-1].count("user: ") == 1


def test_a_block_tells_what_it_is(serve: Serve, visit: Visit) -> None:
    served = serve()
    tab = visit(served.url)
    tab.ask("hello")
    tab.page.locator("canvas.map").hover(position={"x": 5, "y": 5})
    tip = tab.page.locator(".tip", has_text=re.compile(r"Block 0: reusable.* content hash [0-9a-f]{8}…"))
    tip.wait_for()
    assert "left by chat-1-1" in tip.inner_text()


def test_clear_while_streaming_stays_cleared(serve: Serve, visit: Visit) -> None:
    served = serve()
    tab = visit(served.url)
    tab.send("a story")
    tab.page.get_by_text("Once upon a time").wait_for()
    tab.page.get_by_role("button", name="Clear").click()
    tab.answered()
    wait_until(served.is_idle)
    assert tab.page.get_by_test_id("bot").count() == 0


def test_a_dead_engine_is_shown_and_the_next_message_starts_another(serve: Serve, visit: Visit, model: Any) -> None:
    served = serve()
    tab = visit(served.url)
    tab.ask("please die")
    tab.page.get_by_text("engine died: RuntimeError: the scripted model was told to die").first.wait_for()
    assert "died" in tab.page.get_by_test_id("bot").last.inner_text()
    tab.page.get_by_role("button", name="Start it again").wait_for()
    tab.ask("hello")
    assert model.engines == 2
    tab.page.get_by_text("engine running").wait_for()
    assert "Hello there." in tab.page.get_by_test_id("bot").first.inner_text() + tab.page.locator("#chat").inner_text()


def test_guests_the_small_pool_and_the_past(serve: Serve, visit: Visit, pictures: Path) -> None:
    served = serve()
    tab = visit(served.url)
    tab.page.get_by_role("button", name="More guests").click()
    served.until(lambda header: header["running"] >= 3 and header["shared"] > 0)
    wait_until(lambda: len(served.server.recorder.past()["samples"]) > 4)
    tab.page.screenshot(path=pictures / "light.png")
    settings = tab.page.locator("details.settings")
    for close in (lambda: tab.page.keyboard.press("Escape"), lambda: tab.page.locator("canvas.map").click()):
        settings.locator("summary").click()
        settings.locator("select.policy").wait_for()
        close()
        settings.locator("select.policy").wait_for(state="hidden")
    tab.page.get_by_role("button", name="Small pool (48)").click()
    served.until(lambda header: header["num_blocks"] == 48 and header["status"] == "serving")
    tab.page.get_by_role("button", name="Normal pool (256)").wait_for()
    tab.page.locator("#kv-when").fill("-60")  # the oldest picture there is: the large pool, with everything free
    tab.page.locator(".size", has_text="256 blocks of 16 tokens").wait_for()
    tab.page.get_by_role("button", name="Back to live").click()
    tab.page.locator(".size", has_text="48 blocks of 16 tokens").wait_for()
    for _ in range(3):
        tab.page.get_by_role("button", name="One guest fewer").click()
        tab.page.wait_for_timeout(100)
    served.until(lambda header: header["guests"] == 0)
    wait_until(served.is_idle)


def test_dark_narrow_and_the_keyboard(serve: Serve, visit: Visit, pictures: Path) -> None:
    served = serve()
    tab = visit(served.url, color_scheme="dark")
    tab.ask("hello")
    tab.page.wait_for_function("document.body.classList.contains('dark')")
    tab.page.screenshot(path=pictures / "dark.png")
    tab.page.set_viewport_size({"width": 420, "height": 900})
    tab.page.screenshot(path=pictures / "narrow.png", full_page=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # nothing sticks out
    tab.page.get_by_text(re.compile("stay reusable")).first.wait_for()  # the panel's picture is up to 0.2 s old
    board = tab.page.locator("canvas.map")
    assert "0 shared" in str(board.get_attribute("aria-label"))
    board.focus()
    tab.page.keyboard.press("ArrowRight")
    assert re.match(r"Block 0: reusable", tab.page.locator(".spoken").inner_text())
    nameless = tab.page.evaluate(
        """[...document.querySelectorAll('button, input, select, textarea')].filter(e => e.offsetParent !== null && !e.ariaLabel
        && !e.title && !e.innerText.trim() && !e.labels?.length && !e.getAttribute('aria-labelledby')).map(e => e.outerHTML)"""
    )
    assert nameless == []


def test_five_tabs_of_one_browser_stream_at_once(serve: Serve, visit: Visit, chromium: Any) -> None:
    served = serve(options={"num_blocks": 2048})
    context = chromium.new_context(viewport={"width": 900, "height": 700})
    tabs = [visit(served.url, context) for _ in range(5)]
    for tab in tabs:
        tab.send("a story")
    served.until(lambda header: header["running"] == 5)
    for tab in tabs:
        tab.page.get_by_text("Once upon a time").wait_for()
    context.close()
    wait_until(served.is_idle)
