"""dpofit: memory-tuned DPO recipes for LLaMA-Factory, and the tool that predicts, launches and guards them."""

__version__ = "0.1.0"
