"""Side by side with trainers and engines that run on JAX, each in an environment of its own."""
