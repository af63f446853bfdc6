"""The check of a GPU: ``scripts/gpu_check``, or ``python -m minivllm_plugin.bench.gpu``.

Each part runs in a process of its own with a limit of its own (:mod:`.command`), so that a kernel that hangs, or writes
where it must not, costs that part alone. What a part found it says at once, record by record (:mod:`.records`).
"""
