"""From a recipe to a running torchrun: preflight, environment, one node or many, in a terminal you can close."""
