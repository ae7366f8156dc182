"""Generation: cache, sampling, stop strings, the batched engine, and the model behind `unfreeze.load`.

Layer 6.
"""
