"""Tensor parallelism: one model computed by several processes, each of which holds a part of every layer.

Rank 0 is the engine thread of the user's own process; every further rank is a child process. Importing this room loads no
torch and starts nothing.
"""
