"""The storage of weights, and their transfer to where they are needed. The path of a weight:

place.py       meta -> filled once, from its file, on the device or where the layout says
owned.py       which process reads which bytes: each byte once
residency.py   offload: experts in host memory or on disk, prefetched one layer ahead into two buffers
groups.py    a layer larger than a buffer: its experts in groups
units.py     what is loaded into a buffer at once
peers.py     frozen weights sharded in n parts, all-gathered layer by layer
dispatch.py    expert parallelism: tokens are sent to the processes that hold their experts, and back
fsdp.py        trained weights sharded by rows over all processes (torch's FSDP2)
boundary.py    a layer's input offloaded to host memory between forward and backward
"""
