"""L7, the loop: batches -> step -> events.

fit.py is the loop. step, optim, schedule, state, run and balance hold what it calls.
"""
