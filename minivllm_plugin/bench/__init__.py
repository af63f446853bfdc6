"""Measurements that ``minivllm bench`` and ``benchmarks/`` share: workloads, scenarios, and reports that say where they ran.

Every scenario takes a live engine (or settings for one), returns a :class:`~minivllm_plugin.bench.report.Report` and prints
nothing. Nothing in the engine imports this package.
"""
