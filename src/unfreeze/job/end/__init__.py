"""The results of a run: its folder, summary, checkpoint and model card; and resuming it."""
