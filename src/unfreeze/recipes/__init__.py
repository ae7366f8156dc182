"""L9, the kinds of training: each a Config on top, then main, then the Parts that job.run puts together."""
