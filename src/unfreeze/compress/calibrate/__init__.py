"""Rounding chosen by what the weights are multiplied with: rows go through the model, layer by layer."""
