"""Run the command line by `python -m unfreeze`, or `torchrun --nproc-per-node 2 -m unfreeze sft …`."""

import sys

from unfreeze.cli import main

sys.exit(main())
