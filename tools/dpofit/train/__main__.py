"""`python -m dpofit.train RECIPE [key=value …]`: what torchrun, or accelerate, runs in each process."""

from dpofit.train.entry import main

main()
