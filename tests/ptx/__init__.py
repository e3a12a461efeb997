"""The PTX that Mosaic GPU emits, executed on a CPU: a machine for it, and the kernels run on it.

parser       the text of a module -> instructions
arithmetic   what each instruction without memory computes, bit for bit, in NumPy
memory       buffers with bounds, alignment, definedness and data races checked
machine      the threads of one or more CTAs, in step until they diverge
transfers    the machine's instructions that move data between threads and memory
host         how a kernel is launched, from the host code that Mosaic compiled for it
kernels      calls of pallas_kernels whose kernels run here
cases        which calls, against the float64 oracle
mutants      the same PTX with one instruction spoiled: is it noticed?
run_kernels  all of it, as a table
"""
