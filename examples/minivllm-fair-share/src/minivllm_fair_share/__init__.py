"""A plugin of minivllm-plugin, in one entry point. Importing it loads no torch: plugins are imported at every start."""

from minivllm_fair_share.plugin import FairShare
from minivllm_fair_share.settings import Settings
from minivllm_fair_share.shares import Shares

__all__ = ["FairShare", "Settings", "Shares"]
