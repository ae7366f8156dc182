"""How CPU and Triton loops are written here: compiler options, tiles, rows, scratch memory, cores."""
