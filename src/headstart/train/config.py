"""Recipes: strict typed YAML, `extends:` for variants, `key.sub=value` overrides. The one way to configure a run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from headstart.errors import UserError, nearest

PositionWeight = Literal["exponential", "sampled", "dpace", "auf"]
"""What a recipe can ask for: `exponential`, `dpace` or `until_failure` (auf) of `headstart.train.weights`, or `thinned`
(sampled) of `headstart.train.batches`."""


FREE_TO_CHANGE = {"steps", "minutes", "epochs", "eval_every", "save_every", "log_every", "tracker", "project"}
"""Train settings that may differ when a training goes on from a checkpoint: how long, how often, and who watches."""


class Section(BaseModel):
    """A part of a recipe. Unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSection(Section):
    """The frozen model."""

    spec: str = Field("smollm2-135m", description="Packaged name, hub id, folder, or .gguf file.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto is bfloat16 where the machine is fast at it."
    )
    device: str = Field("auto", description="auto is CUDA when there is one.")
    revision: str | None = Field(None, description="Revision of a hub id.")
    exact: Literal["auto", "bits", "tokens"] = Field(
        "auto",
        description="What drafts leave as it is: every bit, or the tokens; auto keeps the bits where that is cheap.",
    )


class DataSection(Section):
    """Conversations that the target itself writes."""

    prompts: str = Field(
        "self", description="'self' (the target writes its own prompts), a .jsonl/.json file, or a datasets name."
    )
    split: str = Field("train", description="Split, when prompts is a datasets name.")
    revision: str | None = Field(None, description="Branch, tag or commit, when prompts is a dataset of the hub.")
    openers: Literal["broad", "none"] = Field(
        "broad", description="Self-prompts start from openers over what people ask, or from nothing."
    )
    conversations: int = Field(1600, ge=1, description="Training conversations at most.")
    heldout: int = Field(64, ge=0, description="Conversations kept out of training, for reports.")
    calibration: int = Field(48, ge=1, description="Conversations kept out of training, for validation and tuning.")
    minutes: float | None = Field(None, gt=0, description="Stop writing training conversations after this long.")
    max_prompt_tokens: int = Field(384, ge=8, description="Longer prompts are left out, later turns as well.")
    max_new_tokens: int = Field(160, ge=8, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Temperature of the answers; 0 is greedy.")
    sampled_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of the training answers drawn at temperature 1 instead."
    )
    batch_size: int = Field(64, ge=1, description="Conversations written at a time.")
    regenerate: bool = Field(True, description="Replace the answers of a given file by the target's own.")
    seed: int = Field(0, description="Seed of prompts and answers.")
    cache_gigabytes: float = Field(4.0, gt=0, description="Most bytes of hidden states kept on disk, in 1e9.")


class TrainSection(Section):
    """The training loop."""

    steps: int | None = Field(None, ge=1, description="Optimiser steps; with minutes, whichever ends first.")
    minutes: float | None = Field(None, gt=0, description="Wall-clock budget; the schedule follows the clock.")
    epochs: int = Field(50, ge=1, description="Passes over the data at most.")
    batch_tokens: int = Field(4096, ge=64, description="Tokens of a batch, padding included.")
    accumulate: int = Field(1, ge=1, description="Batches per optimiser step.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon makes the updates of matrices orthogonal; LM heads, norms and biases stay with AdamW.",
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    min_lr_ratio: float = Field(0.05, ge=0, le=1, description="Final learning rate, as a share of the peak.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the run spent warming up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    clip: float = Field(1.0, gt=0, description="Gradient norm limit.")
    loss: str = Field("soft_ce", description="Loss between draft and target distributions.")
    position_weight: PositionWeight = Field(
        "exponential",
        description="How much each step of a draft counts: step_weight to the power k; sampled (the same on average: "
        "that share of the drafts goes on to step k, and less is computed); dpace (by what the expected "
        "length gains); auf (step_weight to the power k through the draft's first failure, then nothing).",
    )
    step_weight: float = Field(0.8, gt=0, le=1, description="Step k of a draft weighs this to the power k.")
    feature_weight: float = Field(
        0.0, ge=0, description="Weight of a smooth L1 loss between drafted features and final states; 0 is none."
    )
    noise: float = Field(
        0.0, ge=0, description="Uniform noise on the states in training, as a share of each state's own size."
    )
    finish: float = Field(
        0.0, ge=0, le=1, description="Share of the run, at its end, that learns only where drafting would start."
    )
    start_from: str | None = Field(None, description="Folder of earlier heads whose fitting weights are taken over.")
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field("auto", description="auto follows the target.")
    eval_every: int = Field(100, ge=1, description="Optimiser steps between validations.")
    save_every: int = Field(200, ge=1, description="Optimiser steps between checkpoints.")
    log_every: int = Field(10, ge=1, description="Optimiser steps between logged losses.")
    tracker: Literal["none", "wandb", "trackio", "tensorboard"] = Field("none", description="accelerate tracker.")
    project: str = Field("headstart", description="Project name for the tracker.")
    seed: int = Field(0, description="Seed of initialisation and batch order.")


class TuneSection(Section):
    """Measuring costs and choosing the tree."""

    widths: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32, 64), description="Tree widths whose verification is timed.")
    context: int = Field(256, ge=8, description="Tokens in the cache while timing.")
    max_nodes: int = Field(64, ge=1, description="Widest tree, root included.")
    max_rank: int = Field(10, ge=1, description="Drafts of a depth considered.")


class EvalSection(Section):
    """The report at the end of a run."""

    questions: str = Field("heldout", description="'heldout' (the run's own held-out prompts) or a question file.")
    limit: int | None = Field(16, ge=1, description="Prompts measured at most.")
    max_new_tokens: int = Field(128, ge=1, description="Tokens of an answer.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    compare: tuple[str, ...] = Field(
        ("heads+ngram",), description="Other drafters in the same report; see `headstart eval --compare`."
    )


class Recipe(Section):
    """Everything a run depends on."""

    name: str = Field(description="Folder under runs/.")
    description: str = Field("", description="One sentence for `headstart recipes`.")
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    heads: dict[str, Any] = Field(description="Family and its settings.")
    train: TrainSection = TrainSection()
    tune: TuneSection = TuneSection()
    eval: EvalSection = EvalSection()

    @field_validator("target", mode="before")
    @classmethod
    def _short_target(cls, value: Any) -> Any:
        return {"spec": value} if isinstance(value, str) else value


def recipe_text(recipe: Recipe) -> str:
    """A recipe with every setting filled in, as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def packaged_recipes() -> dict[str, Path]:
    """Recipes that ship with headstart, by name."""
    folder = Path(str(resources.files("headstart") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A packaged recipe by name or a YAML file by path, with `key.sub=value` overrides.

    Raises:
        UserError: unknown recipe, unreadable YAML, unknown key (the nearest is named) or a value out of range.
    """
    values = _read(name, Path(), [])
    for override in sorted(overrides, key=lambda one: not one.startswith("heads.family=")):  # it drops the others
        _override(values, override)
    return parse_recipe(values)


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Check a recipe's values.

    Raises:
        UserError: unknown key (the nearest is named) or a value out of range.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def _read(name: str, folder: Path, seen: list[str]) -> dict[str, Any]:
    """Values of a recipe and of those it extends; a path in `extends` starts at the folder of the file it stands in."""
    known = packaged_recipes()
    path = known.get(name) or folder / Path(name).expanduser()
    if not path.is_file():
        where = f" (extended by {seen[-1]})" if seen else ""
        raise UserError(f"No recipe {name!r}{where}.", f"{nearest(name, known)} A path to a YAML file works too.")
    place = str(path.resolve())
    if place in seen:
        raise UserError(f"Recipe {name!r} extends itself ({' -> '.join([*seen, place])}).", "Break the circle.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "Mend the file.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings.", "Start from a packaged recipe: headstart recipes show quickstart")
    values.setdefault("name", path.stem)
    parent = values.pop("extends", None)
    return _merge(_read(str(parent), path.parent, [*seen, place]), values) if parent else values


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = _of_family(base, over["family"]) if "family" in over else dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _of_family(heads: dict[str, Any], family: Any) -> dict[str, Any]:
    """Settings of heads that still mean something when the family becomes this one."""
    if heads.get("family") in (None, family):
        return dict(heads)
    from headstart.heads import HeadConfig  # here: reading recipes needs neither torch nor transformers otherwise

    return {key: value for key, value in heads.items() if key in HeadConfig.model_fields}


def _override(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise UserError(f"{override!r} is not an override.", "Write key=value, for example train.lr=3e-4.")
    place = values
    *folders, leaf = key.split(".")
    for folder in folders:
        inner = place.setdefault(folder, {})
        if isinstance(inner, str) and folder == "target":
            inner = place[folder] = {"spec": inner}
        if not isinstance(inner, dict):
            raise UserError(f"{folder!r} in {override!r} has no settings inside.", f"Write {folder}=value.")
        place = inner
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            value = float(value)
        except ValueError:
            value = text
    if leaf == "family":
        kept = _of_family(place, value)
        place.clear()
        place.update(kept)
    place[leaf] = value


def _explain(error: ValidationError) -> UserError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section: Any = Recipe
        for part in first["loc"][:-1]:
            section = section.model_fields[str(part)].annotation
        known = list(section.model_fields)
        return UserError(f"Unknown recipe key {where!r}.", nearest(str(first["loc"][-1]), known))
    if first["type"] == "missing":
        return UserError(f"The recipe has no {where!r}.", "Add it, or start from another recipe (extends: quickstart).")
    return UserError(f"Recipe key {where!r}: {first['msg']} (got {first.get('input')!r}).", "Correct the value.")
