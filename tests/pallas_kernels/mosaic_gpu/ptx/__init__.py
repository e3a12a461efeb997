"""The GPU kernels, compiled for an H100 and executed from their PTX: `.ci/heavy ptx`.

kernels      calls of pallas_kernels whose kernels run on `tests.ptx_machine`
cases        the calls, against the float64 oracle
mutants      the same PTX with one instruction spoiled: is it noticed?
run_kernels  all of it, as a table
"""
