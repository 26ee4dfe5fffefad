"""The frozen model: loading, aux hidden states, static KV cache, forward over a token tree."""

from headstart.target.cache import TreeCache
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.target.identity import Adapter, Identity
from headstart.target.lm_head import Finish
from headstart.target.loading import load_target
from headstart.target.model import Exact, Target, TargetOutput
from headstart.target.teacher import TeacherModel
from headstart.target.tree import DraftTree, TreeShape

__all__ = [
    "FINAL",
    "Adapter",
    "DraftTree",
    "Exact",
    "Finish",
    "FrozenModel",
    "Identity",
    "Target",
    "TargetOutput",
    "TeacherModel",
    "TreeCache",
    "TreeShape",
    "load_target",
]
