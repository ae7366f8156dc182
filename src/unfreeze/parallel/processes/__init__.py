"""The processes of a run, and how they talk. Only these files and fsdp.py import torch.distributed.

collectives.py  Group             sums, gathers and texts among some processes; Alone is a group of one
mesh.py         Mesh [data, ep]   who holds which experts, over whom a gradient is summed
roll.py         Roll              who takes part; who is gone, said once, and nobody hangs
lanes.py        Lane              copies and exchanges that run beside the computation, in one order
"""
