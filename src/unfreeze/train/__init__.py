"""L7, the training loop: batches -> step -> events.

fit.py is the loop. step, optim, schedule, state, run and balance provide its parts.
"""
