"""Speculative decoding in JAX whose logprobs are exact and nearly free.

Nothing is imported here on purpose: the engine side (`decode`, `output_processor`, `openai`,
`engine`) must load without jax, the device side (`loop`, `verify`, `pack`, `model`) with it.
Import the module that you need.
"""
