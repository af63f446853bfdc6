"""A page over a scripted engine, and a real browser to look at it.

Everything but the model is real: Gradio, uvicorn, LiteLLM, the provider, the registry, engine thread, scheduler and pool. A
token is one byte; what the "model" says depends on the last question, and it takes a moment for each token, so that there is
something to see and to stop.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import END, byte_tokenizer
from waiting import wait_until

pytest.importorskip("gradio", reason="the page needs Gradio: pip install 'minivllm-plugin[ui]'")

from minivllm_plugin import registry
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.testing import scripted_llm
from minivllm_ui.app import PageServer, PageSettings
from minivllm_ui.frames import Frame, decode

BROWSER_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
THIRD_PARTY_WARNINGS = (
    "ignore:Items? .* on TypedDict class .* using the `ReadOnly` qualifier:UserWarning",
    "ignore:Accessing the 'model_(computed_)?fields' attribute on the instance is deprecated:DeprecationWarning",
    "ignore::DeprecationWarning:gradio",
    "ignore::DeprecationWarning:starlette",
    "ignore::DeprecationWarning:uvicorn",
    "ignore::DeprecationWarning:websockets",
    "ignore::UserWarning:gradio",
)
CODE = """Look:

```python
def f(x):
    if x < 1 and x > 0:
        return "<b>"
```

and <script>window.hacked = 1</script> <i>"""
STORY = "Once upon a time there was a lighthouse. " * 400
LEAST_PAUSE = 0.002  # seconds a token


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in THIRD_PARTY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _litellm_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM keeps its providers in module globals; each test gets its own."""
    import litellm

    for name, value in {"custom_provider_map": [], "model_cost": dict(litellm.model_cost), "suppress_debug_info": True}.items():
        monkeypatch.setattr(litellm, name, value)


@dataclass
class ScriptedModel:
    """What stands in for the model, for every engine that the registry starts under the name ``scripted``.

    Attributes:
        answers: part of the last question -> the answer; else a long story.
        dies: part of a question at which the engine dies.
        engines: started so far; ``options`` of the last one.
    """

    answers: dict[str, str] = field(default_factory=lambda: {"code": CODE, "hello": "Hello there.", "nothing": ""})
    dies: str = "please die"
    pause: float = LEAST_PAUSE
    engines: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)

    def llm(self, model: str, **options: Any) -> Any:
        self.engines += 1
        self.options = dict(options)
        num_blocks = options.pop("num_blocks")
        llm, _ = scripted_llm(
            num_blocks=num_blocks,
            block_size=16,
            vocab_size=257,
            eos=END,
            tokenizer=self.tokenizer,
            choose=self._choose,
            options=options,
        )
        return llm

    def _choose(self, seq: Any) -> int:
        time.sleep(self.pause)
        prompt = self.tokenizer.decode(seq.token_ids[: seq.num_prompt_tokens])
        if seq.num_completion_tokens == 0:
            self.prompts.append(prompt)
        question = re.findall(r"user: (.*?)\nassistant: $", prompt, re.DOTALL)[-1].split("\nuser: ")[-1]
        if self.dies in question:
            raise RuntimeError("the scripted model was told to die")
        answer = next((text for part, text in self.answers.items() if part in question), STORY)
        ids = [*self.tokenizer.encode(answer), END]
        return ids[min(seq.num_completion_tokens, len(ids) - 1)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    scripted = ScriptedModel()
    monkeypatch.setattr(registry, "LLM", scripted.llm)
    return scripted


class Served:
    """A page that is being served, and shorthands to look at its engine."""

    def __init__(self, server: PageServer) -> None:
        self.server = server
        self.url = server.url

    def frame(self, mine: str = "") -> Frame:
        data = self.server.recorder.frame(mine=mine)
        assert data is not None
        return decode(data)

    def header(self) -> dict[str, Any]:
        return dict(self.frame().header)

    def is_idle(self) -> bool:
        header = self.header()
        return header["held"] == header["shared"] == header["running"] == header["waiting"] == header["preempted"] == 0

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        wait_until(lambda: condition(self.header()))


Serve = Callable[..., Served]


@pytest.fixture
def serve(model: ScriptedModel) -> Iterator[Serve]:
    """Start a page over the scripted model -> :class:`Served`."""
    running: list[PageServer] = []

    def start(**settings: Any) -> Served:
        options = {"num_blocks": 256, **settings.pop("options", {})}
        server = PageServer(PageSettings(model="scripted", port=0, options=options, **settings))
        server.start()
        running.append(server)
        return Served(server)

    yield start
    for server in running:
        server.close()


# --- a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's chromium under playwright; skipped where either is missing, which fails in CI.

    For a module, not for the session: while it is there, an event loop runs on this thread, and nobody else's can.
    """
    path = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        path = None
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs the playwright package and a chromium: scripts/test installs both")
        pytest.skip("no browser: apt-get install chromium, and pip install playwright")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Visitor:
    """One tab. Fails the test on a console error, an uncaught exception or a request to another host."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str) -> "Visitor":
        self.page.goto(url)
        self.page.wait_for_function("window.__kvFrames > 0")
        return self

    def send(self, text: str) -> None:
        box = self.page.get_by_role("textbox", name="Message")
        box.fill(text)
        box.press("Enter")

    def ask(self, text: str) -> None:
        """Send, and wait for the end of the answer."""
        asked = self.page.get_by_test_id("user").count()
        self.send(text)
        self.page.wait_for_function("n => document.querySelectorAll('[data-testid=user]').length > n", arg=asked)
        self.answered()

    def answered(self) -> None:
        self.page.get_by_role("button", name="Send", exact=True).wait_for()

    def stats(self) -> str:
        return str(self.page.get_by_test_id("bot").last.inner_text())


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Visitor]]:
    """A new tab, of a visitor of their own unless ``context`` is given."""
    visitors: list[Visitor] = []
    contexts: list[Any] = []

    def make(url: str, context: Any = None, **options: Any) -> Visitor:
        if context is None:
            context = chromium.new_context(viewport={"width": 1440, "height": 900}, **options)
            contexts.append(context)
        page = context.new_page()
        visitor = Visitor(page)
        page.on("console", lambda message: message.type == "error" and visitor.complaints.append(message.text))
        page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((url, "data:", "blob:")) or visitor.complaints.append(f"foreign: {request.url}")
            ),
        )
        visitors.append(visitor)
        return visitor.open(url)

    yield make
    for context in contexts:
        context.close()
    assert [complaint for visitor in visitors for complaint in visitor.complaints] == []


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots are left for people to look at; nothing compares them."""
    folder = Path(os.environ.get("CI_OUTPUT") or Path(__file__).parents[2] / ".ci-output") / "ui"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
