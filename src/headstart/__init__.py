"""headstart: draft heads for a frozen language model, and lossless decoding with them."""
__version__ = "0.1.0"
