"""Keeping and sharing heads: our folder format, the model card, pushing to the Hub and fetching from it."""

from headstart.hub.card import write_card
from headstart.hub.format import adapter_spec, check_folder, export_heads, quantization, read_heads, target_spec
from headstart.hub.pull import fetch, has_heads, locate
from headstart.hub.push import Upload, push

__all__ = [
    "Upload",
    "adapter_spec",
    "check_folder",
    "export_heads",
    "fetch",
    "has_heads",
    "locate",
    "push",
    "quantization",
    "read_heads",
    "target_spec",
    "write_card",
]
