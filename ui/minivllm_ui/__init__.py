"""The browser page, ``minivllm ui``, and its terminal sister, ``minivllm top``: chat, and the KV blocks live.

May know minivllm_plugin, LiteLLM and Gradio; reaches LiteLLM's provider by ``minivllm_plugin.register()`` only. Importing this
package loads nothing; it sets two variables that Gradio and LiteLLM read while they are imported, so that neither asks any host
for anything.

Three layers. :mod:`~minivllm_ui.observer` hears the engine's hooks; :mod:`~minivllm_ui.recorder` folds what it heard into
pictures of the pool, outside the engine; :mod:`~minivllm_ui.app` serves them beside a Gradio chat that talks to the engine
through LiteLLM.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # else Gradio reports its start and looks for a newer version
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM fetches a price list
