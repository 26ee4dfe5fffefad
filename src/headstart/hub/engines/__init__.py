"""Heads for serving engines: one file per format, and what they have in common.

A further format is a class of `base.Format` and an entry in `FORMATS`.
"""

from headstart.hub.engines.base import Finding, Format, TargetFacts
from headstart.hub.engines.export import (
    FORMATS,
    HEADSTART,
    Exported,
    check_export,
    engine_names,
    export_for,
    export_remarks,
    format_named,
    format_of,
    formats_of,
)
from headstart.hub.engines.importing import import_heads

__all__ = [
    "FORMATS",
    "HEADSTART",
    "Exported",
    "Finding",
    "Format",
    "TargetFacts",
    "check_export",
    "engine_names",
    "export_for",
    "export_remarks",
    "format_named",
    "format_of",
    "formats_of",
    "import_heads",
]
