"""Shapes of dense decoder models, from a known name or a config.json."""
