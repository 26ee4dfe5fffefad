"""Heads in transformers' own `generate`: `model.generate(..., custom_generate=...)`."""

from headstart.generation.call import CustomGenerate, SpeculativeOutput, custom_generate, generate

__all__ = ["CustomGenerate", "SpeculativeOutput", "custom_generate", "generate"]
