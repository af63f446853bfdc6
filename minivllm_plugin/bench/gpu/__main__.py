"""``python -m minivllm_plugin.bench.gpu``."""

import sys

from minivllm_plugin.bench.gpu.command import main

sys.exit(main())
