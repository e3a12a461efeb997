"""`jax-specdec check-device` without a device, on the kernels' own code; and on wrong kernels.

    python -m tests.rehearsal [mosaic_gpu] [mosaic_tpu] [FAULT ...]

runs the whole command, report and all: the GPU's kernels are compiled for an H100 and executed as
PTX (needs the `aot` extra), the TPU's are interpreted. `faults` names those whose source has a line
that is wrong: the report must name what they break, and nothing else.
"""
