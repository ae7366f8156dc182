"""The hot ops: one folder per op, with reference.py (readable torch: the oracle) and its faster candidates.

choice/ decides which one runs; loops/ has shared code of the CPU loops. Layer 3.

A candidate's module is imported when it is chosen, inside a function: numba takes 0.4 s, Triton is missing on
many machines, and a run needs only its own device's candidates. The other imports inside functions break a
cycle, such as choose.py's of predicted.py.
"""

import os

# oneDNN compiles a bf16 GEMM for every number of rows and caches 1,024 of them, 0.65 to 0.75 MB each; torch
# caches as many more per thread. With packed batches that number changes from step to step: 0.6 GB that a run
# would never free. Set at import, because both are read at the first GEMM of the process, whatever code runs
# it. A value set by the user stays.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
