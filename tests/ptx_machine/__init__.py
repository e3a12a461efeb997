"""A machine that executes the PTX of Mosaic GPU on a CPU. It imports nothing of this project.

parser        the text of a module -> instructions
arithmetic    what each instruction without memory computes, bit for bit, in NumPy
memory        buffers with bounds, alignment, definedness and data races checked
undefined     which values come from memory that nothing wrote
threads       the threads of one or more CTAs: registers, shared memory, barriers
instructions  what moves data between threads and memory
machine       a launch: all threads in step until they diverge
host          how a kernel is launched, from the host code that Mosaic compiled for it
"""
