// What Gradio's widgets lack: names for buttons that are only icons.

const NAMES = { 'button.submit-button': 'Send', 'button.stop-button': 'Stop', '#chat button.icon-button': 'To the end' };

function name() {
  for (const [selector, text] of Object.entries(NAMES)) {
    document.querySelectorAll(`${selector}:is(:not([aria-label]), [aria-label=""])`).forEach(button => button.setAttribute('aria-label', text));
  }
}

new MutationObserver(name).observe(document.documentElement, { childList: true, subtree: true });
name();
