"""L7, what a model does: probes of behaviour over its answers. Pure functions of text; asking the model is the caller's part."""
