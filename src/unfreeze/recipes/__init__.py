"""L9, the kinds of training: each file has main, the command, and the Parts that job.run puts together."""
