"""L8, a run from its config to its results. Read setup.py first: its six functions are the order of things.

setup.py    config -> Setup: opened, encoded, planned, placed, begun, watched
job.py      Job and run: the recipe's parts, the one loop (train/fit.py), the end
parts.py    what a recipe hands over
opening/    planning/    watch/    end/    the pieces of these, in the order of a run
doctor/     the same checks without a run
"""
