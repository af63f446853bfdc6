"""Tensors: weights, KV cache, batches and sampling. Everything here runs on the engine thread."""
