"""Algorithms, pure: arrays and floats in, arrays or (loss, metrics) out; no model, no config."""
