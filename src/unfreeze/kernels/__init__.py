"""L3, the hot ops: a folder per op with reference.py (readable torch: the oracle) and its faster candidates."""

import os

# oneDNN compiles a bf16 GEMM for every number of rows and keeps 1,024 of them, 0.65 to 0.75 MB each, and torch keeps as many more per thread:
# with packed batches, where that number changes from step to step, 0.6 GB that a run never gives back. Read at the first GEMM of the process.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
