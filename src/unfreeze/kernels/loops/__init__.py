"""Shared parts of the CPU and Triton loops: compiler options, tiles, rows, scratch memory, cores."""
