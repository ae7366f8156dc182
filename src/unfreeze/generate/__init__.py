"""L6, generation: cache, sampling, stop strings, the batched engine, and the public model behind
`unfreeze.load`."""
