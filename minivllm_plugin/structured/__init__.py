"""Structured output: completions that a JSON schema, a regular expression, a list of choices or a grammar allows, and no other.

llguidance does the parsing; this room turns requests into its grammars, keeps compiled ones, and lets a
logits processor mask every token that cannot continue. Runs on the same door as any plugin's logits processor.
"""

from minivllm_plugin.structured.params import StructuralTag, StructuredOutputsParams

__all__ = ["StructuralTag", "StructuredOutputsParams"]
