"""The Gradio page. Empty for now."""
