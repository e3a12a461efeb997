"""Shared memory between the model worker and the engine. Needs numpy and posix_ipc, never jax."""
