"""`mla`: convert trained transformers to multi-head latent attention, calibrate, evaluate and run them."""

__version__ = "0.1.0"
