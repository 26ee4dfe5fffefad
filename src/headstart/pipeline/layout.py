"""Where things lie in the folder of a run."""

TARGET = "target"
CONVERSATIONS = "data/conversations"
QUESTIONS = "data/heldout.jsonl"
STATES = "data/states"
TRAIN = "train"
ADAPTER = "adapter"
"""Beside heads that were trained with it, as peft saves adapters."""
TUNE = "tune"
HEADS = "heads"
REPORT = "report"

LAYOUT = 2
"""Raised when a run's folder comes to mean something else."""
