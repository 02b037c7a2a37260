"""Tandem: reinforcement learning for language models, with training and inference on one model code.

Importing this package has no effects: no thread, no environment variable, no torch.
"""

__version__ = "0.1.0"
