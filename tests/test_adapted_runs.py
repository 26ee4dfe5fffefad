"""Whole runs on an adapted target: with an existing adapter, and with one trained together with the heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headstart
from headstart.doctor.subject import find_subject
from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.pipeline.run import execute
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import load_recipe
from tests.test_pipeline import quiet, tiny_recipe
from tests.tiny import save_tiny_adapter

PROMPT = list(range(5, 40))


def test_medusa_2_from_prompts_to_a_report(tiny_target_folder: Path, tmp_path: Path) -> None:
    joint = {"rank": 4, "warmup": 0.5, "lr_ratio": 1.0}
    recipe = tiny_recipe(tmp_path, tiny_target_folder, train={"lr": 3e-2, "steps": 12, "eval_every": 6, "joint": joint})
    run = tmp_path / "runs" / "m2"
    execute(quiet(run, recipe), STAGES)
    decoder = headstart.load(run, dtype="float32", device="cpu")
    adapter = decoder.target.adapter
    assert adapter is not None and Path(adapter.spec) == run / "heads" / "adapter"
    words = decoder.generate(PROMPT, max_new_tokens=12, draft="on").tokens
    assert words == decoder.generate(PROMPT, max_new_tokens=12, draft="off").tokens, "the adapted model's own"
    results = json.loads((run / "report" / "results.json").read_text())
    assert results["settings"]["adapter"]["hash"] == adapter.hash
    report = (run / "report" / "report.md").read_text()
    assert "The target is the adapted model" in report and "nats per token from the model without" in report
    assert "The target is the adapted model" in (run / "report" / "report.html").read_text()
    card = (run / "heads" / "README.md").read_text()
    assert "**with an adapter**" in card and "trained with the heads (Medusa-2)" in card
    assert not execute(quiet(run, recipe), STAGES), "nothing to do again"
    subject = find_subject(str(run), quick=True)
    assert subject.target.adapter is not None and subject.target.adapter.hash == adapter.hash
    assert subject.heads.draft_steps == 2


def test_heads_for_a_target_with_an_adapter(tiny_target_folder: Path, tmp_path: Path) -> None:
    adapter = save_tiny_adapter(tmp_path / "lora", tiny_target_folder)
    recipe = tiny_recipe(tmp_path, tiny_target_folder)
    bound = recipe.target.model_copy(update={"adapter": str(adapter)})
    recipe = recipe.model_copy(update={"target": bound})
    run = tmp_path / "runs" / "bound"
    execute(quiet(run, recipe), STAGES)
    adapter.rename(tmp_path / "gone")
    decoder = headstart.load(run, dtype="float32", device="cpu")
    words = decoder.generate(PROMPT, max_new_tokens=12, draft="on").tokens
    plain = load_target(str(tiny_target_folder), "float32", "cpu", adapter=str(tmp_path / "gone"))
    assert words == headstart.load(run, target=plain).generate(PROMPT, max_new_tokens=12, draft="off").tokens
    with pytest.raises(UserError, match="lacks the adapter"):
        headstart.load(run, target=load_target(str(tiny_target_folder), "float32", "cpu"))


def test_the_packaged_recipe_trains_an_adapter() -> None:
    recipe = load_recipe("medusa2")
    assert recipe.train.joint.rank > 0 and recipe.heads.family == "medusa"
