"""Checks of training settings, before any work is done."""

from __future__ import annotations

import torch

from headstart.errors import UserError
from headstart.heads.base import family
from headstart.model.frozen import FrozenModel
from headstart.recipes.recipe import Recipe
from headstart.train.starting_heads import load_earlier_heads
from headstart.train.tracking import check_tracker


def check_training(recipe: Recipe, target: FrozenModel | None = None) -> None:
    """Raise a UserError for settings that cannot work; without a target, earlier heads are not checked against it."""
    section, of_target = recipe.train, recipe.target
    online, fp16 = recipe.data.online, section.mixed_precision == "fp16"
    sharded, low_rank = section.shard_target, section.lora_rank > 0
    features = bool(section.feature_weight) and not family(recipe.heads.family).drafts_features
    refusals = (
        (features, f"{recipe.heads.family} heads draft no features to compare.", "Set train.feature_weight=0."),
        (
            section.loss == "hard_ce" and section.loss_tokens > 0,
            "hard_ce needs the argmax over the full draft vocabulary; train.loss_tokens samples it.",
            "Set train.loss_tokens=0, or train.loss=soft_ce.",
        ),
        (
            fp16 and section.optimizer == "muon",
            "muon runs two optimisers; fp16 loss scaling supports one here.",
            "Set train.mixed_precision=bf16, or train.optimizer=adamw.",
        ),
        (
            fp16 and (of_target.device == "cpu" or not torch.cuda.is_available()),
            "fp16 training needs a GPU.",
            "Set train.mixed_precision=bf16 (or no).",
        ),
        (
            sharded and not online,
            "train.shard_target does not go with data.states=stored.",
            "Set train.shard_target=false (stored states need no target), or set data.states=online.",
        ),
        (
            sharded and recipe.data.states_source is not None,
            "train.shard_target has no effect with data.states_server: the servers hold the target.",
            "Set train.shard_target=false, or data.states_server=null.",
        ),
        (
            sharded and of_target.adapter is not None,
            "train.shard_target does not go with target.adapter.",
            "Set target.adapter=null, or train.shard_target=false.",
        ),
        (
            sharded and of_target.quantization != "none",
            "train.shard_target does not go with target.quantization.",
            "Set target.quantization=none, or train.shard_target=false.",
        ),
        (
            low_rank and section.start_from is None,
            "train.lora_rank adapts earlier heads, and train.start_from names none.",
            "Set train.start_from to a run or a folder of heads, or train.lora_rank=0.",
        ),
        (
            low_rank and section.gradient_checkpointing,
            "train.gradient_checkpointing would compute layers again without their low-rank updates.",
            "Set train.gradient_checkpointing=false, or train.lora_rank=0.",
        ),
    )
    for refused, problem, remedy in refusals:
        if refused:
            raise UserError(problem, remedy)
    check_tracker(section.tracker)
    load_earlier_heads(recipe, target)
