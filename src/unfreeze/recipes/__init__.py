"""L9, the training recipes: each file has main, the command, and the Parts that job.run assembles."""
