#!/usr/bin/env python
"""What torchrun runs, for those who start it themselves: `torchrun --nproc-per-node 8 scripts/train.py RECIPE`.

`dpofit launch` runs the same as `-m dpofit.train`, which also works without this file (wheel installs).
"""

from dpofit.train.entry import main

main()
