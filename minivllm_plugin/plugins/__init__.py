"""Plugins: found, checked, called in isolation. What an author of plugins imports stands here.

:data:`hookimpl` marks an implementation; :mod:`minivllm_plugin.hookspecs` lists the hooks, :mod:`minivllm_plugin.views` and
:mod:`minivllm_plugin.events` what they receive. :class:`RequestTracer` and :class:`QueuedObserver` are bases for observers. The
engine's own side: :mod:`minivllm_plugin.plugins.collection` (who is there), :mod:`minivllm_plugin.plugins.manager` (their life).
"""

from minivllm_plugin.hookspecs import API, hookimpl
from minivllm_plugin.plugins.queued import QueuedObserver
from minivllm_plugin.plugins.tracer import RequestTracer
from minivllm_plugin.views import Admit, Budget, CandidateBlock, EngineState, Reject, RequestView

__all__ = [
    "API",
    "Admit",
    "Budget",
    "CandidateBlock",
    "EngineState",
    "QueuedObserver",
    "Reject",
    "RequestTracer",
    "RequestView",
    "hookimpl",
]
