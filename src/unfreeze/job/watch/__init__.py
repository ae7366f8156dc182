"""What looks at a run while it trains: held-out loss, sample answers, the receipt, and signs."""
