"""Watching a run while it trains: held-out loss, sample answers, the receipt, warning signs."""
