"""Where the weights lie, and how they come to where they are needed. The way of one weight:

place.py       meta -> filled once, from its file, on the device or where the layout says
owned.py       which process reads which bytes: each byte once
residency.py   experts in host memory or on disk: two buffers, filled a layer ahead
  groups.py    a layer larger than a buffer: its experts in groups
  units.py     what comes into a buffer at once
  peers.py     frozen weights in n parts, gathered layer by layer
dispatch.py    experts that other processes hold: rows go there and come back
fsdp.py        trained weights in rows on every process (torch's FSDP2)
boundary.py    a layer's input in host memory between forward and backward
"""
