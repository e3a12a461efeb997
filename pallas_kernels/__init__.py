"""Kernels that turn logits into compact token logprobs: top K, chosen ids and token ranks."""
