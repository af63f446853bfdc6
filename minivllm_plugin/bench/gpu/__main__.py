"""``python -m minivllm_plugin.bench.gpu``."""

import sys

from minivllm_plugin.bench.gpu.command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
