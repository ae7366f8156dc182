"""One file per benchmark: `unfreeze dev bench NAME` runs benchmarks/cases/NAME.py."""
