"""A LLaMA-Factory YAML, its DeepSpeed JSON, overrides and environment, resolved into one Recipe."""
