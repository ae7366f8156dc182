"""Level 8: a run, from its config to its results.

Read setup.py first: its six functions are the order of a run.

setup.py    config -> Setup: opened, encoded, planned, placed, begun, watched
job.py      Job and run: the recipe's parts, the training loop (train/fit.py), the results
parts.py    Parts: what a recipe defines
opening/    planning/    watch/    end/    the steps of these, in the order of a run
doctor/     the checks of a run, without training
"""
