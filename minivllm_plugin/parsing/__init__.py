"""What a model wrote, taken apart: reasoning, answer, tool calls. Works on text alone, whole or piece by piece, with one result.

Any thread, one parser a request. Formats by name: :mod:`minivllm_plugin.parsing.formats`.
"""
