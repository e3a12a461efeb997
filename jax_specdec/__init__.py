"""Speculative decoding in JAX whose logprobs are exact and nearly free.

The package has two doors: `jax_specdec.engine`, which never imports jax, and `jax_specdec.device`,
which does, as `jax_specdec.adapters` for other trainers and engines do. Nothing is imported here,
so that a process loads only what it uses.
"""
