"""Head families: one file each; `base` is the contract and the registry."""

from headstart.heads.base import (
    DraftHead,
    HeadBatch,
    HeadConfig,
    StepPrediction,
    families,
    family,
    make_config,
    register,
)

__all__ = [
    "DraftHead",
    "HeadBatch",
    "HeadConfig",
    "StepPrediction",
    "families",
    "family",
    "make_config",
    "register",
]
