"""A machine that executes the PTX of Mosaic GPU on a CPU; README.md has its modules."""
