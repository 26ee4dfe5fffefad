"""The store of hidden states: correct values, recovery from kills and damage, and the byte budget."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headstart.support.files
from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.states import shards
from headstart.data.states.shards import Capture, ShardIndex, StateKind, build_store, shard_size
from headstart.data.states.store import StateStore, estimate_bytes
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.data.loading import some_conversations
from tests.spies import raising, spy
from tests.tiny import tiny_model

AUX_LAYERS = (1, FINAL)
PLENTY = 10**9


def build(folder: Path, target: Target, taken: Sequence[Conversation], **options: Any) -> StateStore:
    """Build a store of several small shards, computed in batches of two or three conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", (20_000, 20_000))
        patch.setattr(shards, "BATCH_TOKENS", 64)
        return build_store(folder, taken, target, **{"aux_layers": AUX_LAYERS, "budget_bytes": PLENTY, **options})


class Forwards:
    """Counts forwards and rows of a target; raises KeyboardInterrupt at forward `kill_at`."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> None:
        self.count = 0
        self.rows = 0
        stock = target.hidden_states

        def hidden_states(rows: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> object:
            if self.count == kill_at:
                raise KeyboardInterrupt
            self.count += 1
            self.rows += len(rows)
            return stock(rows, aux_layers)

        monkeypatch.setattr(target, "hidden_states", hidden_states)


def test_stored_states_match_the_target(tiny_target: Target, tmp_path: Path) -> None:
    given = some_conversations(tiny_target)
    seen: list[tuple[int, int]] = []
    build(tmp_path / "store", tiny_target, given, advance=lambda done, total: seen.append((done, total)))
    store = StateStore(tmp_path / "store")
    assert len(list((tmp_path / "store").glob("shard-*"))) > 1
    assert (len(store), store.aux_layers, store.dropped, store.notice) == (7, AUX_LAYERS, 0, "")
    assert store.lengths == [len(item.tokens) for item in given]
    assert store.tokens == sum(store.lengths)
    for i, conversation in enumerate(given):
        sample = store.get(i)
        assert sample.tokens_T.tolist() == list(conversation.tokens)
        assert sample.tokens_T.dtype == torch.int64
        assert sample.supervised_T.tolist() == list(conversation.supervised)
        (expected,) = tiny_target.hidden_states([conversation.tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:  # a padded batch sums in another order: float32 rounding
            torch.testing.assert_close(sample.states[layer], expected[layer], rtol=1e-4, atol=1e-5)
    totals = {total for _, total in seen}
    assert totals == {store.tokens}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == store.tokens
    with pytest.raises(IndexError):
        store.get(7)


def test_dtype_is_the_targets(tmp_path: Path, tiny_target: Target) -> None:
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size).to(torch.bfloat16)
    store = build(tmp_path, Target(model, tiny_target.tokenizer), some_conversations(tiny_target, 2))
    assert store.get(0).states[FINAL].dtype == torch.bfloat16


def test_supervised_counts(tiny_target: Target, tmp_path: Path) -> None:
    given = some_conversations(tiny_target)
    store = build(tmp_path, tiny_target, given)
    counts_V = store.supervised_counts(tiny_target.vocab_size)
    assert counts_V.shape == (tiny_target.vocab_size,)
    assert int(counts_V.sum()) == sum(sum(item.supervised) for item in given)
    assert counts_V[tiny_target.tokenizer.eos_token_id] == len(given)


@pytest.mark.parametrize(("states_dtype", "header"), [("auto", 600), ("fp8", 1200)])
def test_size_matches_the_estimate(tiny_target: Target, tmp_path: Path, states_dtype: str, header: int) -> None:
    store = build(tmp_path, tiny_target, some_conversations(tiny_target), states_dtype=states_dtype)
    sizes = store.tokens, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype
    expected = estimate_bytes(*sizes, states_dtype)
    assert expected <= store.bytes <= expected + header * len(list(tmp_path.glob("shard-*")))


class TestResume:
    @pytest.mark.parametrize("kill_at", [0, 1, 2, 3])
    def test_after_a_kill(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
    ) -> None:
        """The second build computes only missing shards and gives the store of an uninterrupted build."""
        given = some_conversations(tiny_target)
        whole = build(tmp_path / "whole", tiny_target, given)
        with monkeypatch.context() as patch:
            killed = Forwards(tiny_target, patch, kill_at)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path / "store", tiny_target, given)
        with pytest.raises(UserError, match="no finished store"):
            StateStore(tmp_path / "store")
        kept = len(list((tmp_path / "store").glob("shard-*.safetensors")))
        with monkeypatch.context() as patch:
            rest = Forwards(tiny_target, patch)
            store = build(tmp_path / "store", tiny_target, given)
        assert rest.rows < len(given) or not kept
        assert killed.count == kill_at
        self.same(whole, store)

    def test_killed_while_writing(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)

        replace = os.replace

        def die(source: Path, path: Path) -> None:
            if path.suffix == ".safetensors":
                raise KeyboardInterrupt
            replace(source, path)

        with monkeypatch.context() as patch:
            patch.setattr(headstart.support.files.os, "replace", die)
            with pytest.raises(KeyboardInterrupt):
                build(tmp_path / "store", tiny_target, given)
        assert not [file for file in (tmp_path / "store").iterdir() if file.is_file()]
        store = build(tmp_path / "store", tiny_target, given)
        self.same(build(tmp_path / "whole", tiny_target, given), store)

    def test_full_disk_in_a_shard(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given, written = some_conversations(tiny_target), []

        def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
            save_file(tensors, path, metadata)
            if written:
                path.write_bytes(path.read_bytes()[:1000])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            written.append(path)

        with monkeypatch.context() as patched:
            patched.setattr("safetensors.torch.save_file", full)
            with pytest.raises(OSError, match="No space left"):
                build(tmp_path, tiny_target, given)
        files = [file.suffix for file in tmp_path.iterdir() if file.is_file()]
        assert files == [".safetensors"], "the complete shard alone"
        forwards = Forwards(tiny_target, monkeypatch)
        assert len(build(tmp_path, tiny_target, given)) == len(given)
        assert 0 < forwards.rows < len(given)

    def test_finished_build_is_kept(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        build(tmp_path, tiny_target, given)
        forwards = Forwards(tiny_target, monkeypatch)
        build(tmp_path, tiny_target, given)
        assert forwards.count == 0

    def test_kill_before_manifest(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        whole = build(tmp_path / "whole", tiny_target, given)
        build(tmp_path / "store", tiny_target, given)
        (tmp_path / "store" / "manifest.json").unlink()
        forwards = Forwards(tiny_target, monkeypatch)
        self.same(whole, build(tmp_path / "store", tiny_target, given))
        assert forwards.count == 0

    def test_cut_shard_is_rebuilt(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        whole = build(tmp_path / "whole", tiny_target, given)
        build(tmp_path / "store", tiny_target, given)
        shard = whole.files[1]
        shard = tmp_path / "store" / shard.name
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(UserError, match=rf"{shard.name} is cut short .*only that shard"):
            StateStore(tmp_path / "store")
        forwards = Forwards(tiny_target, monkeypatch)
        store = build(tmp_path / "store", tiny_target, given)
        assert 0 < forwards.rows < len(given)
        self.same(whole, store)
        shard.unlink()
        with pytest.raises(UserError, match="is missing"):
            StateStore(tmp_path / "store")

    @staticmethod
    def same(one: StateStore, other: StateStore) -> None:
        assert one.lengths == other.lengths
        for i in range(len(one)):
            for layer in one.aux_layers:
                assert torch.equal(one.get(i).states[layer], other.get(i).states[layer])


def test_conversation_takes_few_reads(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read for the tokens and one per layer, safe under concurrent threads."""
    store = build(tmp_path, tiny_target, some_conversations(tiny_target))
    read, reads = os.preadv, list[int]()

    def noted(handle: int, buffers: list[memoryview], start: int) -> int:
        reads.append(read(handle, buffers, start))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", noted)
    sample = store.get(3)
    sizes = [4 * len(sample.tokens_T), *[state_TE.nbytes for state_TE in sample.states.values()]]
    assert len(sizes) == 3 and reads == sizes
    store.samples([3], [FINAL])
    assert reads[3:] == [sizes[0], sizes[2]], "no other layer is read"
    with ThreadPoolExecutor(4) as threads:
        for one, other in zip(threads.map(store.get, range(7)), map(StateStore(tmp_path).get, range(7)), strict=True):
            assert all(torch.equal(one.states[layer], other.states[layer]) for layer in AUX_LAYERS)


class TestDamage:
    """A flipped bit is detected before training uses it, and costs one shard."""

    @pytest.mark.parametrize("where", ["states", "tokens", "header"])
    def test_bit_flip(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        given = some_conversations(tiny_target)
        before = build(tmp_path, tiny_target, given)
        kept = [before.get(i).states[FINAL].clone() for i in range(len(given))]
        shard = before.files[0]
        flip(shard, where)
        store = StateStore(tmp_path)
        with pytest.raises(UserError, match=rf"{shard.name} is damaged.*kept as {shard.name}.damaged.*only that shard"):
            for i in range(len(given)):
                store.get(i)
        assert not shard.exists()
        with pytest.raises(UserError, match="is missing"):
            StateStore(tmp_path)
        forwards = Forwards(tiny_target, monkeypatch)
        again = build(tmp_path, tiny_target, given)
        assert 0 < forwards.rows < len(given)
        for i, states_TE in enumerate(kept):
            torch.testing.assert_close(again.get(i).states[FINAL], states_TE, rtol=1e-4, atol=1e-5)

    def test_verification_leaves_files_in_place(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, some_conversations(tiny_target))
        assert store.damaged_files() == []
        flip(store.files[1], "states")
        assert store.damaged_files() == [store.files[1]]
        assert store.files[1].exists()

    def test_memory_error_is_raised(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = build(tmp_path, tiny_target, some_conversations(tiny_target))
        store = StateStore(tmp_path)

        monkeypatch.setattr(
            StateStore, "_part", raising(RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)"))
        )
        with pytest.raises(RuntimeError, match="Cannot allocate memory"):
            store.get(0)
        assert store.files[0].exists()

    def test_shard_removed_during_use(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, some_conversations(tiny_target))
        for file in store.files:
            file.unlink()
        with pytest.raises(UserError, match=r"is missing\..*data build"):
            store.get(0)


def poison(target: Target, monkeypatch: pytest.MonkeyPatch, *poisoned: Sequence[int]) -> None:
    """Have the target compute a NaN for these texts, as an overflow would."""
    stock = target.hidden_states

    def hidden_states(rows: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> Any:
        states = stock(rows, aux_layers)
        for row, of_row in zip(rows, states, strict=True):
            if list(row) in map(list, poisoned):
                of_row[FINAL][3, 5] = torch.nan
        return states

    monkeypatch.setattr(target, "hidden_states", hidden_states)


@pytest.mark.parametrize("states_dtype", ["auto", "fp8"])
def test_not_finite_conversations_are_left_out_by_name(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states_dtype: str
) -> None:
    taken = some_conversations(tiny_target)
    poison(tiny_target, monkeypatch, taken[2].tokens, taken[5].tokens)
    for _ in range(2):  # existing shards do not list them
        store = build(tmp_path, tiny_target, taken, states_dtype=states_dtype)
        assert (len(store), store.dropped, store.left_out) == (5, 0, {2: "c2", 5: "c5"})
        assert "2 conversations are left out" in store.notice and "'c2', 'c5'" in store.notice
        assert [store.number_of(index) for index in range(8)] == [0, 1, None, 2, 3, None, 4, None]
        for index, item in enumerate(taken):
            if (number := store.number_of(index)) is not None:
                sample = store.get(number)
                assert sample.tokens_T.tolist() == list(item.tokens)
                assert sample.supervised_T.tolist() == list(item.supervised)
                assert all(state_TE.isfinite().all() for state_TE in sample.states.values())
    with pytest.raises(UserError, match=r"None of 1 conversations has hidden states: .* not finite"):
        build(tmp_path / "other", tiny_target, taken[2:3])
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_captured_states_are_kept_only_if_finite(tiny_target: Target, tmp_path: Path) -> None:
    taken = some_conversations(tiny_target, 3)
    states = tiny_target.hidden_states([item.tokens for item in taken], AUX_LAYERS)
    states[1][1][0, 0] = -torch.inf
    kind = StateKind(tiny_target, AUX_LAYERS)
    Capture(tmp_path, kind).store(list(zip(taken, states, strict=True)))
    keys = [tokens_key(item.tokens) for item in taken]
    assert ShardIndex(tmp_path, kind.owner).missing(keys, AUX_LAYERS) == {AUX_LAYERS: [keys[1]]}


def flip(file: Path, where: str) -> None:
    """Flip one bit of a shard: in its states, tokens or header (lengths)."""
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    names = json.loads(content[8 : 8 + header])
    start = 8 + content[8 : 8 + header].index(b"lengths") if where == "header" else 8 + header
    if where != "header":
        start += next(named["data_offsets"][0] for name, named in names.items() if name.startswith(where))
    content[start + 5] ^= 1
    file.write_bytes(content)


def test_shard_size_grows_with_the_store() -> None:
    for total in (10**6, 10**9, 20 * 10**9, 550 * 10**9, 5 * 10**12):
        assert total / shard_size(total) <= max(200, total / 2e9)
        assert 64e6 <= shard_size(total) <= 2e9


class TestCodes:
    """States stored in one byte a number, with a scale per token."""

    @pytest.mark.parametrize(("states_dtype", "lost"), [("int8", 0.02), ("fp8", 0.05)])
    def test_int8_and_fp8_only_round(self, tiny_target: Target, tmp_path: Path, states_dtype: str, lost: float) -> None:
        given = some_conversations(tiny_target)
        plain = build(tmp_path / "plain", tiny_target, given)
        built = build(tmp_path / "codes", tiny_target, given, states_dtype=states_dtype)
        store = StateStore(tmp_path / "codes")
        assert store.bytes < 0.45 * plain.bytes, "float32 takes four bytes a number"
        assert store.fingerprint == built.fingerprint != plain.fingerprint, "trainings on them differ"
        for i, item in enumerate(given):
            sample = store.get(i)
            assert sample.tokens_T.tolist() == list(item.tokens)
            for layer in AUX_LAYERS:
                exact_TE = plain.get(i).states[layer]
                assert sample.states[layer].dtype == exact_TE.dtype
                shares_T = (sample.states[layer] - exact_TE).norm(dim=-1) / exact_TE.norm(dim=-1)
                assert 0 < shares_T.max() < lost

    def test_budget_holds_more(self, tiny_target: Target, tmp_path: Path) -> None:
        given = some_conversations(tiny_target)
        tokens = sum(len(item.tokens) for item in given[:3])
        budget = estimate_bytes(tokens, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype)
        assert len(build(tmp_path / "plain", tiny_target, given, budget_bytes=budget)) == 3
        assert len(build(tmp_path / "codes", tiny_target, given, budget_bytes=budget, states_dtype="int8")) > 3

    def test_coexist_with_plain(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target, 3)
        shards = tmp_path / "shards"
        plain = build(tmp_path / "plain", tiny_target, given, shards=shards)
        build(tmp_path / "codes", tiny_target, given, shards=shards, states_dtype="int8")
        forwards = Forwards(tiny_target, monkeypatch)
        build(tmp_path / "codes", tiny_target, given, shards=shards, states_dtype="int8")
        again = build(tmp_path / "plain", tiny_target, given, shards=shards)
        assert forwards.count == 0
        assert (again.files, again.fingerprint) == (plain.files, plain.fingerprint)

    def test_a_flipped_scale_is_noticed(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, some_conversations(tiny_target), states_dtype="int8")
        flip(store.files[0], "scales")
        with pytest.raises(UserError, match="is damaged"):
            for i in range(len(store)):
                StateStore(tmp_path).get(i)


class TestMore:
    """Shards are only added: a conversation in an existing shard is not computed again."""

    def test_more_conversations(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        first = build(tmp_path / "one", tiny_target, given[:4], shards=tmp_path / "shards")
        before = {file: file.stat().st_mtime_ns for file in first.files}
        forwards = Forwards(tiny_target, monkeypatch)
        store = build(tmp_path / "two", tiny_target, given[::-1], shards=tmp_path / "shards")
        assert forwards.rows == 3
        assert [store.get(i).tokens_T.tolist() for i in range(7)] == [list(item.tokens) for item in given[::-1]]
        for i in range(4):
            for layer in AUX_LAYERS:
                assert torch.equal(store.get(6 - i).states[layer], first.get(i).states[layer])
        assert {file: file.stat().st_mtime_ns for file in first.files} == before
        assert len(StateStore(tmp_path / "one")) == 4, "the first store is as it was"

    def test_fewer_conversations(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        forwards = Forwards(tiny_target, monkeypatch)
        store = build(tmp_path / "two", tiny_target, [given[5], given[2], given[5]], shards=tmp_path / "shards")
        assert forwards.count == 0
        assert [store.get(i).tokens_T.tolist() for i in range(3)] == [list(given[i].tokens) for i in (5, 2, 5)]

    def test_additional_layer(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target)
        first = build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        asked = spy(monkeypatch, tiny_target, "hidden_states", lambda _rows, layers: tuple(layers))
        store = build(tmp_path / "two", tiny_target, given, aux_layers=(2, *AUX_LAYERS), shards=tmp_path / "shards")
        assert set(asked) == {(2,)}
        assert store.aux_layers == (2, *AUX_LAYERS)
        assert store.fingerprint == first.fingerprint, "the same texts, whichever layers are stored"
        for i, conversation in enumerate(given):
            (expected,) = tiny_target.hidden_states([conversation.tokens], store.aux_layers)
            for layer in store.aux_layers:
                torch.testing.assert_close(store.get(i).states[layer], expected[layer], rtol=1e-4, atol=1e-5)

    def test_other_mask_same_states(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = some_conversations(tiny_target, 3)
        first = build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        forwards = Forwards(tiny_target, monkeypatch)
        masked = [Conversation(c.id, c.tokens, [*c.supervised[:-1], True], c.messages) for c in given]
        store = build(tmp_path / "two", tiny_target, masked, shards=tmp_path / "shards")
        assert forwards.count == 0
        assert store.fingerprint != first.fingerprint
        assert [store.get(i).supervised_T.tolist() for i in range(3)] == [list(item.supervised) for item in masked]
        assert [mask.tolist() for mask in store.supervised()] == [list(item.supervised) for item in masked]

    def test_other_target_has_its_own_states(self, tiny_target: Target, tmp_path: Path) -> None:
        given = some_conversations(tiny_target)
        first = build(tmp_path, tiny_target, given)
        other = Target(tiny_model("llama", 1, tiny_target.vocab_size, 1024), tiny_target.tokenizer)
        store = build(tmp_path, other, given)
        assert store.fingerprint != first.fingerprint
        (expected,) = other.hidden_states([given[0].tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:
            torch.testing.assert_close(store.get(0).states[layer], expected[layer], rtol=1e-4, atol=1e-5)

    def test_foreign_files_stay(self, tiny_target: Target, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        build(tmp_path, tiny_target, some_conversations(tiny_target, 2))
        build(tmp_path, tiny_target, some_conversations(tiny_target, 3))
        assert (tmp_path / "notes.txt").read_text() == "mine"


class TestBudget:
    def test_last_conversations_are_left_out(self, tiny_target: Target, tmp_path: Path) -> None:
        given = some_conversations(tiny_target)
        per_token = estimate_bytes(1, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype)
        budget = per_token * sum(len(item.tokens) for item in given[:4]) + per_token
        store = build(tmp_path, tiny_target, given, budget_bytes=budget)
        assert (len(store), store.dropped) == (4, 3)
        assert store.notice.startswith("The byte budget holds 4 of 7 conversations")
        assert store.get(3).tokens_T.tolist() == list(given[3].tokens)

    def test_budget_below_one_conversation(self, tiny_target: Target, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"does not hold one conversation .*cache_gigabytes"):
            build(tmp_path, tiny_target, some_conversations(tiny_target), budget_bytes=1000)

    def test_too_little_disk(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            free = 1000

        monkeypatch.setattr(headstart.support.files.shutil, "disk_usage", lambda _place: Full)
        with pytest.raises(UserError, match=r"Keeping hidden states needs .* and 1.0 kB are free"):
            build(tmp_path / "store", tiny_target, some_conversations(tiny_target))
        assert not (tmp_path / "store").exists()


class TestRefusals:
    def test_unstorable_conversations(self, tiny_target: Target, tmp_path: Path) -> None:
        def refuse(match: str, *tokens: int, supervised: bool = True) -> None:
            given = [Conversation("odd", list(tokens), [supervised] * len(tokens), [])]
            with pytest.raises(UserError, match=match):
                build(tmp_path, tiny_target, given)

        refuse("Nothing is supervised in conversation 'odd'", 1, 2, supervised=False)
        refuse("'odd' has 1025 tokens; the context of tiny is 1024", *[1] * 1025)
        refuse("'odd' holds token 5000", 1, 5000)
        with pytest.raises(UserError, match="no conversations"):
            build(tmp_path, tiny_target, [])

    def test_missing_aux_layer(self, tiny_target: Target, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="Layer 9 does not exist"):
            build(tmp_path, tiny_target, some_conversations(tiny_target, 1), aux_layers=(9,))

    def test_unknown_format(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text('{"format": 0}')
        with pytest.raises(UserError, match="another format"):
            StateStore(tmp_path)
        (tmp_path / "manifest.json").write_text('{"format"')
        with pytest.raises(UserError, match="not valid JSON"):
            StateStore(tmp_path)
