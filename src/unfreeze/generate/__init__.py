"""Generation (layer 6): KV cache, sampling, stop strings, engine, and the model of `unfreeze.load`."""
