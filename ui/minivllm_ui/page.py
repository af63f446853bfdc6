"""The page: Gradio's widgets around the chat, and the frame that the live panel fills. Nothing is started here.

No ``gr.State``, no timer, no stream of its own: each would hold one of the six connections that a browser opens to one host,
and the seventh tab would not load.
"""

from pathlib import Path
from typing import Any

import gradio as gr

from minivllm_ui.chat import Chat
from minivllm_ui.conversation import Conversations
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.recorder import Recorder

__all__ = ["STATIC", "SYSTEM_PROMPT", "build_page"]

STATIC = Path(__file__).with_name("static")
SYSTEM_PROMPT = (
    "You are a helpful assistant that runs inside the user's own computer. Answer in a friendly tone, in a few short sentences, "
    "and give one example when it helps. Put code into fenced blocks. If you do not know something, say that you do not know it."
)
EXAMPLES = (
    "What is a cache? Explain it to a child.",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a lighthouse.",
)
MOUNT_PANEL = """
const root = element.querySelector('.kv'), whose = () => props.value || '';
import(new URL('engine/static/panel.js', document.baseURI)).then(panel => panel.mount(root, whose));
"""
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def build_page(host: EngineHost, recorder: Recorder, conversations: Conversations) -> gr.Blocks:
    """The widgets and their events; mount it, nothing is started here."""
    chat = Chat(host, recorder, conversations)
    with gr.Blocks(title=f"minivllm · {host.model}", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(
            f"# minivllm · {host.model}\nEvery conversation fills blocks of the KV cache. Watch them live.",
            elem_id="title",
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=340):
                messages = gr.Chatbot(
                    label="Conversation",
                    elem_id="chat",
                    buttons=["copy"],
                    feedback_options=None,
                    editable="user",
                    placeholder="Ask something, and watch the blocks fill.",
                    examples=[{"text": example} for example in EXAMPLES],
                )
                box = gr.Textbox(
                    label="Message",
                    show_label=False,
                    placeholder="Type a message",
                    submit_btn=True,
                    max_lines=12,
                    autofocus=True,
                    elem_id="message",
                )
                controls = _controls(host)
            with gr.Column(scale=7, min_width=340):
                panel = gr.HTML(
                    "",
                    html_template=(STATIC / "panel.html").read_text(encoding="utf-8"),
                    js_on_load=MOUNT_PANEL,
                    apply_default_css=False,
                    elem_id="engine",
                )
        outputs = [messages, box, panel]
        # concurrency_limit: Gradio's own default of one would queue users behind each other; waiting is the engine's business.
        box.submit(chat.send, [box, *controls], outputs, concurrency_limit=None, **QUIET)
        messages.example_select(_example, None, box, queue=False, **QUIET).then(
            chat.send, [box, *controls], outputs, concurrency_limit=None, **QUIET
        )
        messages.retry(chat.retry, controls, outputs, concurrency_limit=None, **QUIET)
        messages.edit(chat.edit, controls, outputs, concurrency_limit=None, **QUIET)
        messages.undo(chat.undo, None, [messages, box], concurrency_limit=None, **QUIET)
        messages.clear(chat.clear, None, messages, queue=False, **QUIET)
        box.stop(chat.stop, None, None, queue=False, **QUIET)
    page.max_threads = 256  # running events of all tabs, coroutines too; the default of 40 would make the 41st user wait
    page.queue(default_concurrency_limit=None, max_size=256)
    return page  # type: ignore[no-any-return]  # Gradio types what leaves a with block as Any


def _controls(host: EngineHost) -> list[gr.components.Component]:
    """System prompt and sampling, in the order that the handlers of :class:`~minivllm_ui.chat.Chat` take them."""
    defaults = host.defaults
    with gr.Accordion("System prompt and sampling", open=False):
        system = gr.Textbox(SYSTEM_PROMPT, label="System prompt", lines=3, max_lines=8, elem_id="system")
        with gr.Row():
            max_tokens = gr.Slider(1, 4096, 512, step=1, label="Most tokens of an answer", elem_id="max-tokens")
            temperature = gr.Slider(0, 2, defaults.temperature, step=0.05, label="Temperature (0 is greedy)")
        with gr.Row():
            top_p = gr.Slider(0.05, 1, defaults.top_p, step=0.05, label="Top p")
            top_k = gr.Slider(0, 200, max(0, defaults.top_k), step=1, label="Top k (0 keeps all)")
            seed = gr.Textbox("", label="Seed", placeholder="another each time")
    return [system, max_tokens, temperature, top_p, top_k, seed]


def _example(event: gr.SelectData) -> str:
    return str(event.value["text"])
