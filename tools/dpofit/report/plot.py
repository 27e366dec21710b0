"""Plots: memory by phase against the card, and memory against length for each recipe. Needs the `plot` extra."""
