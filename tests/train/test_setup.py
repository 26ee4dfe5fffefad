"""Checks before a training begins, and starting from earlier heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.io import load_heads, save_heads
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe
from headstart.recipes.sections import TrainSection
from headstart.recipes.values import packaged_recipes
from headstart.replay.patch import FINAL
from headstart.train.checks import check_training
from headstart.train.starting_heads import build_heads, copy_matching
from tests.heads.test_contract import prefilled, shake
from tests.train.conftest import MakeRecipe, Train, conversations

EAGLE3 = {"family": "eagle3", "draft_steps": 2, "aux_layers": [1, 2, 3]}


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_pass_the_checks(
    name: str, recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path
) -> None:
    packaged = load_recipe(name)
    if packaged.train.lora_rank:  # the user names the heads to adapt
        with pytest.raises(UserError, match="start_from names none"):
            check_training(packaged)
        save_heads(build_heads(recipe(heads=EAGLE3), tiny_target, train_store), tmp_path / "earlier")
        packaged = load_recipe(name, [f"train.start_from={tmp_path / 'earlier'}"])
    check_training(packaged)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mixed_precision": "fp16"}, "fp16 training needs a GPU"),
        ({"mixed_precision": "fp16", "optimizer": "muon"}, "muon runs two optimisers"),
        ({"loss": "hard_ce", "loss_tokens": 20}, "hard_ce needs the argmax"),
        ({"feature_weight": 1.0}, "medusa heads draft no features"),
        ({"start_from": "nowhere"}, "nowhere.*does not exist"),
    ],
)
def test_impossible_settings_are_refused_by_check(recipe: MakeRecipe, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_training(recipe(**settings))


def test_loss_tokens_are_all_or_at_least_ten() -> None:
    for tokens in (0, 10):
        assert TrainSection(loss_tokens=tokens).loss_tokens == tokens
    with pytest.raises(ValueError, match="10 tokens at least, or with 0 over all"):
        TrainSection(loss_tokens=9)


def test_damaged_earlier_heads_are_refused(recipe: MakeRecipe, earlier: Earlier) -> None:
    check_training(recipe(start_from=str(earlier[0])))
    file = earlier[0] / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="cut short or damaged"):
        check_training(recipe(start_from=str(earlier[0])))


@pytest.mark.parametrize("lacking", ["train_on", "validate_on"])
def test_store_without_a_layer_is_refused(run: Train, tiny_target: Target, tmp_path: Path, lacking: str) -> None:
    made = conversations(3, 0, tiny_target.vocab_size)
    fewer = build_store(tmp_path / "fewer", made, tiny_target, [1, 3, FINAL], budget_bytes=10**8)
    with pytest.raises(UserError, match=r"fewer lacks the states of layer 2, which these heads") as refused:
        run(tmp_path / "train", heads=EAGLE3, **{lacking: fewer})
    assert "Build the data again" in refused.value.remedy
    assert not (tmp_path / "train").exists()


Earlier = tuple[Path, DraftHead]
Build = Callable[..., tuple[DraftHead, str]]


@pytest.fixture
def earlier(recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path) -> Earlier:
    """Random heads of the tiny recipe, with a draft vocabulary that no data would give."""
    heads = build_heads(recipe(), tiny_target, train_store)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    heads.set_draft_vocabulary(torch.arange(200, 280, 2))
    save_heads(heads, tmp_path / "earlier")
    return tmp_path / "earlier", heads


@pytest.fixture
def build(recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, earlier: Earlier) -> Build:
    """Build heads with these settings that start from the earlier ones; return them and the notice."""

    def go(**settings: Any) -> tuple[DraftHead, str]:
        said: list[str] = []
        made = recipe(heads=settings, start_from=str(earlier[0]))
        return build_heads(made, tiny_target, train_store, said.append), " ".join(said)

    return go


def test_same_heads_continue_unchanged(build: Build, earlier: Earlier) -> None:
    heads, said = build()
    expected = earlier[1].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in heads.state_dict().items())
    assert said == f"Started from {earlier[0]}: copied 4 of 4 tensors from the earlier medusa heads."


def test_tensors_that_do_not_fit_keep_their_start(
    build: Build, earlier: Earlier, recipe: MakeRecipe, tiny_target: Target, train_store: StateStore
) -> None:
    heads, said = build(see_root=True)
    assert "3 of 4 tensors" in said
    given = earlier[1].state_dict()
    own = build_heads(recipe(heads={"see_root": True}), tiny_target, train_store).state_dict()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, own[name] if name == "input_KEF" else given[name]), name
    assert not torch.equal(own["draft_to_target_D"], given["draft_to_target_D"])


def test_draft_vocabularies_are_matched_by_token(build: Build, earlier: Earlier, tiny_target: Target) -> None:
    heads, said = build(draft_vocab_size=60)
    ours, theirs = heads.draft_to_target_D.tolist(), earlier[1].draft_to_target_D.tolist()
    common = sorted({*ours} & {*theirs})
    assert 0 < len(common) < 40, "some tokens are common, some are not"
    assert (
        f"copied 4 of 4 tensors from the earlier medusa heads (1 of them for {len(common)} common draft tokens)" in said
    )
    table_KDE, given_KDE = heads.state_dict()["lm_head_KDE"], earlier[1].state_dict()["lm_head_KDE"]
    for position, token in enumerate(ours):
        if token in common:
            expected_KE = given_KDE[:, theirs.index(token)]
        else:
            expected_KE = tiny_target.lm_head_weight[token].expand(2, -1)
        assert torch.equal(table_KDE[:, position], expected_KE), token


def test_only_the_vocabulary_axis_may_differ() -> None:
    """Here the number of heads differs too, and so heads cannot be matched."""
    sizes = {"hidden_size": 8, "vocab_size": 30}
    heads = MedusaHead(MedusaConfig(num_heads=3, draft_vocab_size=20, **sizes))
    other = MedusaHead(MedusaConfig(num_heads=2, draft_vocab_size=10, **sizes))
    with pytest.raises(UserError, match="None of the 4 tensors of these medusa heads matches"):
        copy_matching(heads, other)


def test_other_family_gives_tensors_of_equal_name_and_shape() -> None:
    class Other(MedusaHead):
        family = "other"

    config = {"hidden_size": 8, "vocab_size": 30, "num_heads": 2}
    other = Other(MedusaConfig(**config, num_layers=2))
    torch.nn.init.normal_(other.lm_head_KDE)
    heads = MedusaHead(MedusaConfig(**config))
    assert copy_matching(heads, other) == "copied 2 of 4 tensors from the earlier other heads"
    assert torch.equal(heads.lm_head_KDE, other.lm_head_KDE)


def test_a_family_that_continues_another_starts_as_its_drafts(
    recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path
) -> None:
    """DFlash 2 from DFlash: convolutions and scores start without effect, and nothing is fitted to other layers."""
    block = {"family": "dflash", "block_size": 4, "aux_layers": (1, 2), "mask_token_id": 60, "init": "linear"}
    block |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    first = build_heads(recipe(heads=block), tiny_target, train_store)
    save_heads(shake(first), tmp_path / "first")
    said: list[str] = []
    later = recipe(heads={**block, "family": "dflash2"}, start_from=str(tmp_path / "first"))
    heads = build_heads(later, tiny_target, train_store, said.append)
    assert "copied 11 of 18 tensors from the earlier dflash heads" in said[0]
    text, roots = list(range(3, 15)), torch.tensor([[5]])
    level, logits = torch.zeros(1, 1, dtype=torch.long), []
    for either in (first, heads):
        session = prefilled(either, tiny_target, [text])
        logits.append([either.draft_step(session, roots, level, depth)[0, 0] for depth in range(3)])
    for plain_D, scored_D in zip(*logits, strict=True):
        best_K = plain_D.topk(16).indices
        torch.testing.assert_close(scored_D[best_K], plain_D[best_K])
        assert int(scored_D.isfinite().sum()) == 16


def test_missing_or_foreign_earlier_heads_are_refused(
    recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"nowhere.*does not exist"):
        build_heads(recipe(start_from=str(tmp_path / "nowhere")), tiny_target, train_store)
    config = MedusaConfig(hidden_size=8, vocab_size=30, num_heads=2)
    save_heads(MedusaHead(config), tmp_path / "small")
    with pytest.raises(UserError, match=r"read states of size 8 over 30 tokens"):
        build_heads(recipe(start_from=str(tmp_path / "small")), tiny_target, train_store)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("dflash2", "Name dflash2 or dflash heads, or set train.start_from=null."),
        ("peagle", "Name peagle or eagle3 heads, or set train.start_from=null."),
        ("hydra", "Name hydra heads, or set train.start_from=null."),
    ],
)
def test_earlier_heads_of_a_family_that_starts_no_others_are_refused(
    recipe: MakeRecipe, earlier: Earlier, name: str, remedy: str
) -> None:
    later = recipe(heads={"family": name}, start_from=str(earlier[0]))
    with pytest.raises(UserError, match=f"earlier holds medusa heads, which {name} heads cannot start from") as refused:
        check_training(later)
    assert refused.value.remedy == remedy


def test_peagle_heads_start_from_eagle3_heads_with_the_mean_state_as_their_masks(
    recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path
) -> None:
    first = build_heads(recipe(heads=EAGLE3), tiny_target, train_store)
    save_heads(shake(first), tmp_path / "first")
    parallel = {**EAGLE3, "family": "peagle", "mask_token_id": 60}
    fitted = build_heads(recipe(heads=parallel), tiny_target, train_store).state_dict()
    heads = build_heads(recipe(heads=parallel, start_from=str(tmp_path / "first")), tiny_target, train_store)
    given = first.state_dict()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, (fitted if name == "mask_hidden" else given)[name]), name


def test_run_begins_at_the_tau_of_its_earlier_heads(run: Train, tmp_path: Path) -> None:
    first = run(tmp_path / "first", loss="hard_ce")
    onward: dict[str, Any] = {"loss": "hard_ce", "steps": 1, "lr": 1e-9, "start_from": str(first.heads_folder)}
    second = run(tmp_path / "second", **onward)
    assert second.metrics["tau"] == first.metrics["tau"]
    assert "copied 4 of 4 tensors from the earlier medusa heads" in (tmp_path / "second" / "log.txt").read_text()
    assert torch.equal(
        load_heads(second.heads_folder).draft_to_target_D, load_heads(first.heads_folder).draft_to_target_D
    )
