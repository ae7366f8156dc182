"""What a run opens before its first step: device, dtype, kernels, model, data, and the other processes."""
