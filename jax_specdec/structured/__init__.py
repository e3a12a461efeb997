"""Structured answers: grammars of texts, and which tokens they allow, by llguidance.

It is an extra (`structured`), imported where a request asks for it. Nothing here imports jax: the
engine's process looks at requests with it, a worker makes masks.
"""
