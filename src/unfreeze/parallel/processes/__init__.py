"""The processes of a run and their communication. Only these files and fsdp.py import torch.distributed.

collectives.py  Group             sums, gathers and texts among some processes; Alone is a group of one
mesh.py         Mesh [data, ep]   who holds which experts, over which group a gradient is summed
roll.py         Roll              who takes part; reports lost processes once, so that nobody hangs
lanes.py        Lane              copies and exchanges beside the computation, in one order
"""
