"""Settings of training that cannot work are refused before any work is done for them."""

from __future__ import annotations

import torch

from headstart.errors import UserError
from headstart.heads.base import family
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.target.frozen import FrozenModel
from headstart.target.teacher import TeacherModel
from headstart.train.losses import find_loss
from headstart.train.starting_heads import earlier_heads
from headstart.train.tracking import check_tracker


def check_training(recipe: Recipe, target: FrozenModel | None = None) -> None:
    """Refuse settings of training that cannot work, before any work is done for them.

    Args:
        recipe: its `train` part is checked.
        target: the frozen model, where it is loaded already; without it, whether earlier heads fit it is left open.

    Raises:
        UserError: unknown loss, optimiser and precision that do not go together, a feature loss for heads without
            features, a tracker that will not start, or earlier heads that cannot be read.
    """
    section = recipe.train
    find_loss(section.loss)
    if not all(0 <= beta < 1 for beta in section.betas):
        raise UserError(f"train.betas is {list(section.betas)}.", "Both are at least 0 and below 1: [0.9, 0.95].")
    if section.feature_weight and not family(recipe.heads.family).drafts_features:
        raise UserError(f"{recipe.heads.family} heads draft no features to compare.", "Set train.feature_weight=0.")
    if section.mixed_precision == "fp16" and section.optimizer == "muon":
        raise UserError(
            "muon works beside AdamW, and fp16 scales gradients for one optimiser.",
            "Set train.mixed_precision=bf16, or train.optimizer=adamw.",
        )
    if section.mixed_precision == "fp16" and (recipe.target.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("fp16 training needs a GPU.", "Set train.mixed_precision=bf16 (or no).")
    if section.needs_target and isinstance(target, TeacherModel):
        raise UserError(
            "train.joint runs the target itself, and only its teacher is loaded.",
            "Set train.joint.rank=0, or load the target.",
        )
    if section.shard_target:
        _check_sharding(recipe)
    _check_joint(recipe)
    _check_low_rank(section)
    check_tracker(section.tracker)
    earlier_heads(recipe, target)


def _check_sharding(recipe: Recipe) -> None:
    """Refuse a sharded target where nobody reads it, or where it would have to be whole.

    Raises:
        UserError: what does not go with it.
    """
    for name, given, instead in (
        ("data.states=stored", recipe.data.states == "stored", "data.states=online: stored states need no target"),
        ("target.adapter", recipe.target.adapter is not None, "target.adapter=null"),
        ("target.quantization", recipe.target.quantization != "none", "target.quantization=none"),
    ):
        if given:
            raise UserError(
                f"train.shard_target does not go with {name}.", f"Set {instead}, or train.shard_target=false."
            )


def _check_joint(recipe: Recipe) -> None:
    """Refuse a joint training that cannot work.

    Raises:
        UserError: for a target that has an adapter already, or with settings that do not go with it.
    """
    section = recipe.train
    if not section.joint.rank:
        return
    for name, given, why in (
        ("data.states=online", recipe.data.states == "online", "compares with stored states of the target as it is"),
        ("train.packing", section.packing, "reads a conversation in a row"),
    ):
        if given:
            default = {"data.states=online": "data.states=stored", "train.packing": "train.packing=false"}
            raise UserError(f"train.joint {why}, and {name} is set.", f"Set {default[name]}, or train.joint.rank=0.")
    if recipe.target.adapter is not None:
        raise UserError(
            "train.joint trains an adapter of its own, and target.adapter names another.",
            "Merge that one first (Target.save writes a folder for target.spec), or set train.joint.rank=0.",
        )


def _check_low_rank(section: TrainSection) -> None:
    """Refuse settings with which low-rank updates cannot learn.

    Raises:
        UserError: no heads to adapt, or layers that are computed again.
    """
    if not section.lora_rank:
        return
    if section.start_from is None:
        raise UserError(
            "train.lora_rank adapts earlier heads, and train.start_from names none.",
            "Set train.start_from to a run or a folder of heads, or train.lora_rank=0.",
        )
    if section.gradient_checkpointing:
        raise UserError(
            "train.gradient_checkpointing would compute layers again without their low-rank updates.",
            "Set train.gradient_checkpointing=false, or train.lora_rank=0.",
        )
