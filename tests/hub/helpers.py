"""Exported folders and figures for the Hub tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headstart.heads.base import DraftHead, family, make_config
from headstart.hub.format import export_heads
from headstart.model.model import Target

CONDITIONS = {"machine": "another", "device": "cpu", "dtype": "float32", "threads": 2, "torch": "2.13"}
ENVIRONMENT = {"cpu": "A Fast | CPU", "threads": 2, "dtype": "bfloat16", "gpu": None, "torch": "2.13"}
TUNING: dict[str, Any] = {
    "paths": ((0,), (1,), (0, 0)),
    "node_counts": (1, 2, 4),
    "verify_ms": (1.0, 1.1, 1.3),
    "draft_ms": 0.1,
    "acceptance": [[0.6, 0.1], [0.4, 0.1]],
    "predicted": {"tokens_per_round": 1.9, "speedup": 1.4567, "tokens_per_second": 99.0},
    "curve": [[1, 1.0]],
    "settings": {"device": "cpu", "conditions": CONDITIONS},
}

RESULTS: dict[str, Any] = {
    "summary": {
        "tokens_per_round": 1.87,
        "acceptance_by_position": [0.62, 0.45],
        "rounds_by_position": [1000, 620],
        "tokens_per_second": {"heads": 71.2, "plain": 50.1, "transformers": 44.9, "transformers_prompt_lookup": None},
        "speedup_vs_plain": {"mean": 1.42, "low": 1.37, "high": 1.47},
        "speedup_vs_transformers": {"mean": 1.59, "low": 1.5, "high": 1.66},
        "speedup_vs_prompt_lookup": None,
        "divergences": {"prompts": 48, "tokens_compared": 6000, "count": 2, "unexplained": 0},
        "predicted_speedup": 1.4567,
    },
    "settings": {"questions": 48, "max_new_tokens": 128, "temperature": 0.0, "batch_size": 1},
    "environment": {**ENVIRONMENT, "date": "2026-11-04T09:07:31+00:00"},
}


def make_heads(target: Target, **settings: Any) -> DraftHead:
    """Two Medusa heads with random blocks on the target's LM head."""
    config = make_config({"family": "medusa", "num_heads": 2, **settings}, target)
    heads = family(config.family)(config)
    if config.draft_vocab_size:
        heads.set_draft_vocabulary(torch.arange(config.draft_vocab_size) * 2)
    heads.warm_start(target)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return heads


def export(folder: Path, target: Target, **settings: Any) -> DraftHead:
    """Export random heads to `folder`."""
    heads = make_heads(target, **settings)
    export_heads(folder, heads, target, TUNING, {})
    return heads
