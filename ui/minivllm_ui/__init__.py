"""The browser page, ``minivllm ui``, and its terminal sister, ``minivllm top``: chat, and the KV blocks live.

May know minivllm_plugin, LiteLLM and Gradio; reaches LiteLLM's provider by ``minivllm_plugin.register()`` only. Importing this
package loads nothing.

Three layers. :mod:`~minivllm_ui.observer` hears the engine's hooks; :mod:`~minivllm_ui.recorder` folds what it heard into
pictures of the pool, outside the engine; :mod:`~minivllm_ui.app` serves them beside a Gradio chat that talks to the engine
through LiteLLM.
"""
