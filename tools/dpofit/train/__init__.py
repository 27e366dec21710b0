"""Inside torchrun: the patches that make a LLaMA-Factory or Hugging Face Trainer run safer and leaner."""
