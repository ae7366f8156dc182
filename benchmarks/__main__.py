"""python -m benchmarks NAME …: what `unfreeze dev bench NAME …` does, from the root of the repository."""

import sys

from unfreeze import cli

sys.exit(cli.main(["dev", "bench", *sys.argv[1:]]))
