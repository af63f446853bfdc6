"""Plugins that come with the engine, each behind a public hook and nothing else: what they do, a stranger's package can do.

Named in ``LLM(policies=[…])`` or ``LLM(plugins=[…])`` by the names in :data:`minivllm_plugin.plugins.discovery.BUILTIN`, or
given as objects with other arguments. None is loaded unless it is named. Policies are pure Python; docs/policies.md says
when each helps and what was measured.
"""
