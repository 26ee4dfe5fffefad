"""Every packaged recipe: strictly read, its heads fit a target of the shape it names, and it can be planned."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.prompts.loading import LeftOut, Prompts
from headstart.data.prompts.shapes import Prompt
from headstart.heads.base import families, family, make_config
from headstart.model.model import Target
from headstart.pipeline.plan import make_plan
from headstart.pipeline.run import Run
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import load_recipe
from headstart.recipes.values import packaged_recipes
from tests.heads.test_contract import batch_of

RECIPES = tuple(name for name, file in packaged_recipes().items() if file.parent.name != "zoo")
"""Those of the zoo have tests of their own, in test_zoo.py."""
SHAPES = {
    "smollm2-135m": (30, 49152),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (24, 49152),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 128256),
    "meta-llama/Llama-3.3-70B-Instruct": (80, 128256),
    "Qwen/Qwen3-30B-A3B": (48, 151936),
}
"""Layers and vocabulary of the recipes' targets, from their config.json."""


@cache
def narrow(spec: str) -> Target:
    """A random model as deep as the target and with its vocabulary, but with 16 numbers a state."""
    layers, vocabulary = SHAPES[spec]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=64, **sizes)
    return Target(LlamaForCausalLM(config), spec=spec)


def test_every_family_has_a_recipe_of_its_name() -> None:
    assert set(families()) <= set(RECIPES)


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_recipe_has_its_own_name_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description, "shown by `headstart recipes`"


def test_no_two_recipes_say_the_same() -> None:
    said = [load_recipe(name).model_dump_json(exclude={"name", "description"}) for name in packaged_recipes()]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("name", RECIPES)
def test_heads_fit_the_target_that_the_recipe_names(name: str) -> None:
    recipe = load_recipe(name)
    target = narrow(recipe.target.spec)
    config = make_config(recipe.heads, target)
    heads = family(config.family)(config)
    heads.warm_start(target)
    tokens = list(range(3, 3 + heads.draft_steps + 4))
    steps = list(heads.unroll(batch_of(target, heads, [tokens], prompt=0)))
    assert len(steps) == heads.draft_steps
    assert {step.logits_MD.shape[1] for step in steps} == {recipe.heads.draft_vocab_size or target.vocab_size}
    assert all(step.hidden_MH.isfinite().all() and step.logits_MD.amax(-1).isfinite().all() for step in steps)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_planned(
    name: str, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"role": "user", "content": text} for text in ("Why is the sky blue?", "And at night?")]
    prompts = Prompts([Prompt(asked)], LeftOut(), {})
    monkeypatch.setattr("headstart.pipeline.workload.load_prompts", lambda *_, **__: prompts)  # no network
    overrides = [f"target={tiny_target_folder}", "target.dtype=float32", "heads.draft_vocab_size=64"]
    overrides += ["data.max_prompt_tokens=384", "data.max_new_tokens=160"]  # the tiny target reads 1024
    overrides += ["data.batch_size=2", "train.batch_tokens=512", "tune.widths=[1,2]"]
    recipe = load_recipe(name, overrides)
    settings = family(recipe.heads.family).Config.model_fields
    if "aux_layers" in settings:  # the tiny target has three layers
        block = ["heads.aux_layers=[1,2]", "heads.num_layers=1", "heads.mask_token_id=5"]
        recipe = load_recipe(
            name, [*overrides, *(block if "mask_token_id" in settings else ["heads.aux_layers=[1,2,3]"])]
        )
    plan = make_plan(Run(recipe, tmp_path, Console(file=io.StringIO())))
    assert set(plan.seconds) == {stage.name for stage in STAGES}
    assert all(seconds > 0 for seconds in plan.seconds.values())
    assert plan.peak_bytes > 0 and plan.problems == []
