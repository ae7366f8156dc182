"""A matrix, and inputs whose columns are correlated as in a model: some directions are much larger."""

import torch

ROWS, COLUMNS, TOKENS = 6, 192, 900


def inputs(seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    """(W [rows, columns], X [TOKENS, columns])."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    X = torch.randn(TOKENS, columns, generator=generator) @ mix
    X[:, :: columns // 4] *= 5
    return torch.randn(rows, columns, generator=generator), X
