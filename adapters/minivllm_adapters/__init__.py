"""Adapters: minivllm-plugin behind the interfaces of other frameworks. LiteLLM for now."""
