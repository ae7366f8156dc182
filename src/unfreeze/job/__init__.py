"""L8, what a run is: its folder, plan, receipt, samples, validation, resuming, and what it leaves behind."""
