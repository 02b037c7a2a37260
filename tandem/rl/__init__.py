"""The algorithms, pure: arrays and floats in, arrays or (loss, metrics) out. No model, no config,
no collective."""
