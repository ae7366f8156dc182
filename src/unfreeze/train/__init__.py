"""L7, the loop: batches -> step -> events. fit.py reads aloud; step, optim, schedule, state, run and balance hold what it calls."""
