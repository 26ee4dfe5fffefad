"""A whole run on a target with an adapter."""

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
from tests.test_pipeline import quiet, tiny_recipe
from tests.tiny import save_tiny_adapter

PROMPT = list(range(5, 40))


def test_heads_for_a_target_with_an_adapter(tiny_target_folder: Path, tmp_path: Path) -> None:
    adapter = save_tiny_adapter(tmp_path / "lora", tiny_target_folder)
    recipe = tiny_recipe(tmp_path, tiny_target_folder)
    bound = recipe.target.model_copy(update={"adapter": str(adapter)})
    recipe = recipe.model_copy(update={"target": bound})
    run = tmp_path / "runs" / "bound"
    execute(quiet(run, recipe), STAGES)
    subject = find_subject(str(run), quick=True)
    of_subject = subject.target.adapter
    assert of_subject is not None and subject.heads.draft_steps == 2
    results = json.loads((run / "report" / "results.json").read_text())
    assert results["settings"]["adapter"] == of_subject.hash
    for page in ("report.md", "report.html"):
        assert "The target is the adapted model" in (run / "report" / page).read_text()
    assert "**with an adapter**" in (run / "heads" / "README.md").read_text()
    adapter.rename(tmp_path / "gone")
    decoder = headstart.load(run, dtype="float32", device="cpu")
    words = decoder.generate(PROMPT, max_new_tokens=12, draft="on").tokens
    plain = load_target(str(tiny_target_folder), "float32", "cpu", adapter=str(tmp_path / "gone"))
    assert words == headstart.load(run, target=plain).generate(PROMPT, max_new_tokens=12, draft="off").tokens
    with pytest.raises(UserError, match="lacks the adapter"):
        headstart.load(run, target=load_target(str(tiny_target_folder), "float32", "cpu"))
