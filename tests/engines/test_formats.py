"""Every family in every format that holds it: the reference readers draft with our logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.exchange.published import Layout
from headstart.hub.engines.base import EAGLE3
from headstart.hub.engines.export import FORMATS, check_export, export_for
from headstart.hub.engines.known_engines import KNOWN_ENGINES, EngineTraits
from headstart.model.model import Target
from headstart.servers import names
from headstart.servers.engines import ENGINES
from tests.engines import readers
from tests.engines.conftest import Made, edited

TEXT, CHAIN = [3, 9, 14, 27, 33, 8, 40, 12], [5, 51, 22]
HELD = [
    *((case, form) for case in ("eagle3", "eagle3-reduced", "eagle3-heads") for form in FORMATS),
    *(("eagle3-normed-residual", form) for form in ("vllm", "speculators", "gguf")),
    *((case, form) for case in ("eagle3-qk-norm", "peagle", "peagle-own") for form in ("vllm", "speculators")),
    ("eagle3-deep", "vllm"), ("eagle", "vllm"), ("eagle-plain", "vllm"), ("eagle-plain", "sglang"),
    ("medusa", "vllm"), ("medusa-shared", "vllm"),
]  # fmt: skip


@torch.no_grad()
def ours(heads: DraftHead, target: Target, chain: list[int]) -> Tensor:
    """Return draft logits after each token of a chain, over the target's vocabulary."""
    states = target.prefill(target.new_cache(1, len(TEXT)), [TEXT], heads.aux_layers).aux_hidden_states
    session, level = heads.prefill([TEXT], states), torch.zeros(1, 1, dtype=torch.long)
    logits = []
    for depth, token in enumerate(chain[: heads.draft_steps]):
        logits_D = heads.draft_step(session, torch.tensor([[token]]), level, depth)[0, 0]
        logits.append(readers.into_vocabulary(logits_D, heads.draft_to_target_D, target.vocab_size))
    return torch.stack(logits)


@torch.no_grad()
def read(form: str, folder: Path, target: Target, chain: list[int] = CHAIN) -> Tensor:
    """Return an engine's draft logits from its reference reader."""
    out = target.model(torch.tensor([TEXT]), output_hidden_states=True)
    hidden, final_TE = [one[0] for one in out.hidden_states], out.hidden_states[-1][0]
    kept = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
    target.model(torch.tensor([TEXT]))
    handle.remove()
    hidden[-1] = kept[0]  # engines use the last layer's output before the final norm
    embed_VE, lm_head_VE = target.embedding_weight, target.lm_head_weight
    if form == "gguf":
        return readers.eagle3_gguf(folder / "heads.gguf", hidden, embed_VE, TEXT, chain)
    config, _ = readers.folder_of(folder)
    if config.get("model_type") == "medusa":
        return readers.medusa_folder(folder, final_TE[-1])
    if "mask_token_id" in config:
        return readers.peagle_folder(folder, hidden, embed_VE, TEXT, chain)
    if "eagle_aux_hidden_state_layer_ids" in config:
        return readers.eagle3_folder(folder, hidden, embed_VE, TEXT, chain)
    return readers.eagle_folder(folder, final_TE, embed_VE, lm_head_VE, TEXT, chain)


def off(ours_KV: Tensor, theirs_KV: Tensor) -> float:
    """Return the largest difference over tokens that both draft, relative to the largest logit."""
    both = ours_KV.isfinite() & theirs_KV.isfinite()
    return float((ours_KV - theirs_KV)[both].abs().max() / ours_KV[both].abs().max())


@pytest.mark.parametrize(("case", "form"), HELD)
def test_readers_draft_with_our_logits(case: str, form: str, made: Made, target: Target, tmp_path: Path) -> None:
    heads, folder = made(case)
    done = export_for(folder, tmp_path / "out", form, dtype="float32")
    ours_KV, theirs_KV = ours(heads, target, CHAIN), read(form, tmp_path / "out", target)
    if not case.startswith("eagle-") and case != "eagle":  # EAGLE-1 heads draft from all tokens of the LM head
        assert torch.equal(ours_KV.isfinite(), theirs_KV.isfinite()), "the same tokens are drafted"
    assert off(ours_KV, theirs_KV) < 1e-5
    assert ours_KV.argmax(-1).tolist() == theirs_KV.argmax(-1).tolist()
    for engine in done.commands:
        assert check_export(tmp_path / "out", [engine]) == []
    assert check_export(tmp_path / "out", against=folder) == []


def test_names_of_formats_and_engines_are_complete() -> None:
    assert names.FORMATS.split(", ") == list(FORMATS)
    assert names.KNOWN_ENGINES.split(", ") == list(KNOWN_ENGINES)
    assert names.ENGINES.split(", ") == list(ENGINES)
    assert {engine for format in FORMATS.values() for engine in format.readers} == set(KNOWN_ENGINES)
    for engine in ENGINES.values():
        assert engine.name in FORMATS[engine.format].engines


def test_engine_is_defined_by_its_traits(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its faults, remarks and command; `also` of a format lists further readers."""

    def faults(checkpoint: Any, _: Any) -> Iterator[tuple[str, str]]:
        yield from [("It stops.", "Wait.")] if "stop" in checkpoint.config else []

    new = EngineTraits(
        "new",
        {Layout.EAGLE3: (EAGLE3,)},
        faults={Layout.EAGLE3: faults},
        command=lambda folder, published, facts, drafts: ["serve", folder, str(drafts)],
        remarks=lambda published: ["It is new."],
    )
    monkeypatch.setitem(KNOWN_ENGINES, "new", new)
    monkeypatch.setattr(FORMATS["vllm"], "also", ("new",), raising=False)
    done = export_for(made("eagle3")[1], tmp_path / "out", "vllm", dtype="float32")
    assert "It is new." in done.remarks and done.commands["new"] == f"serve {tmp_path / 'out'} '{{1: 3}}'"
    assert check_export(tmp_path / "out", ["new"]) == []
    with edited(tmp_path / "out") as config:
        config["stop"] = True
    assert [finding.problem for finding in check_export(tmp_path / "out", ["new"])] == ["It stops."]
    assert check_export(tmp_path / "out", ["vllm"]) == []


@pytest.mark.parametrize("form", FORMATS)
def test_every_dtype_is_complete(form: str, made: Made, tmp_path: Path) -> None:
    _, folder = made("eagle3-reduced")
    for dtype in FORMATS[form].dtypes:
        export_for(folder, tmp_path / dtype, form, dtype=dtype)
        assert check_export(tmp_path / dtype) == []
        assert check_export(tmp_path / dtype, against=folder) == []
