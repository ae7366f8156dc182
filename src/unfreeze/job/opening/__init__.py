"""Opening a run: device, dtype, kernels, model, data, and agreement between processes."""
