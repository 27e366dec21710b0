"""Importing this module installs the save guard: one line at the top of any Trainer script is enough."""

from dpofit.train.guard import install

install()
