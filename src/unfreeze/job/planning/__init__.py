"""Planning a run: its memory plan, settings for a first run, remedies when memory is short."""
