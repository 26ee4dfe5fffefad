"""The store holds what the target computes, survives kills, and keeps to its budget."""

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
from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.states.shards import Capture, ShardIndex, StateKind, Work, build_store, shard_size
from headstart.data.states.store import StateStore, estimate_bytes
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.tiny import tiny_model

AUX_LAYERS = (1, FINAL)
PLENTY = 10**9


def conversations(target: Target, count: int = 7) -> list[Conversation]:
    out = []
    for i in range(count):
        messages = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "la " * (1 + 5 * i % 7)}]
        out.append(Conversation(f"c{i}", *encode(messages, target.tokenizer), messages))
    return out


def build(folder: Path, target: Target, taken: Sequence[Conversation], **options: Any) -> StateStore:
    aux_layers = options.pop("aux_layers", AUX_LAYERS)
    places = {name: options.pop(name) for name in ("budget_bytes", "shards") if name in options}
    work = Work(**{"batch_tokens": 64, "shard_bytes": 20_000, **options})
    return build_store(folder, taken, target, aux_layers, **{"budget_bytes": PLENTY, **places}, work=work)


class Forwards:
    """Counts a target's forwards, and may kill the process at one of them."""

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


def test_holds_what_the_target_computes(tiny_target: Target, tmp_path: Path) -> None:
    given = conversations(tiny_target)
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
        for layer in AUX_LAYERS:  # rows of a padded batch are summed in another order: float32 rounding apart
            torch.testing.assert_close(sample.states[layer], expected[layer], rtol=1e-4, atol=1e-5)
    totals = {total for _, total in seen}
    assert totals == {store.tokens}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == store.tokens
    with pytest.raises(IndexError):
        store.get(7)


def test_dtype_of_the_target(tmp_path: Path, tiny_target: Target) -> None:
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size).to(torch.bfloat16)
    store = build(tmp_path, Target(model, tiny_target.tokenizer), conversations(tiny_target, 2))
    assert store.get(0).states[FINAL].dtype == torch.bfloat16


def test_counts(tiny_target: Target, tmp_path: Path) -> None:
    given = conversations(tiny_target)
    store = build(tmp_path, tiny_target, given)
    counts_V = store.supervised_counts(tiny_target.vocab_size)
    assert counts_V.shape == (tiny_target.vocab_size,)
    assert int(counts_V.sum()) == sum(sum(item.supervised) for item in given)
    assert counts_V[tiny_target.tokenizer.eos_token_id] == len(given)


def test_size_is_as_estimated(tiny_target: Target, tmp_path: Path) -> None:
    store = build(tmp_path, tiny_target, conversations(tiny_target))
    expected = estimate_bytes(store.tokens, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype)
    assert expected <= store.bytes <= expected + 600 * len(list(tmp_path.glob("shard-*")))


class TestResume:
    @pytest.mark.parametrize("kill_at", [0, 1, 2, 3])
    def test_after_a_kill(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
    ) -> None:
        """The second build computes only what is missing and gives the store of an uninterrupted one."""
        given = conversations(tiny_target)
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
        given = conversations(tiny_target)

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

    def test_a_disk_that_is_full_in_the_middle_of_a_shard(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given, written = conversations(tiny_target), []

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
        assert files == [".safetensors"], "the shard before it, and nothing half"
        forwards = Forwards(tiny_target, monkeypatch)
        assert len(build(tmp_path, tiny_target, given)) == len(given)
        assert 0 < forwards.rows < len(given)

    def test_a_finished_store_is_not_computed_again(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target)
        build(tmp_path, tiny_target, given)
        forwards = Forwards(tiny_target, monkeypatch)
        build(tmp_path, tiny_target, given)
        assert forwards.count == 0

    def test_killed_before_the_manifest(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target)
        whole = build(tmp_path / "whole", tiny_target, given)
        build(tmp_path / "store", tiny_target, given)
        (tmp_path / "store" / "manifest.json").unlink()
        forwards = Forwards(tiny_target, monkeypatch)
        self.same(whole, build(tmp_path / "store", tiny_target, given))
        assert forwards.count == 0

    def test_a_shard_cut_short_is_computed_again(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target)
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


def test_what_is_kept_of_a_conversation_is_read_at_once(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by a call that other threads do not wait for: a read for its tokens and one for each layer."""
    store = build(tmp_path, tiny_target, conversations(tiny_target))
    read, reads = os.preadv, list[int]()

    def noted(handle: int, buffers: list[memoryview], start: int) -> int:
        reads.append(read(handle, buffers, start))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", noted)
    sample = store.get(3)
    sizes = [4 * len(sample.tokens_T), *[state_TE.nbytes for state_TE in sample.states.values()]]
    assert len(sizes) == 3 and reads == sizes
    store.samples([3], [FINAL])
    assert reads[3:] == [sizes[0], sizes[2]], "of no other layer"
    with ThreadPoolExecutor(4) as threads:
        for one, other in zip(threads.map(store.get, range(7)), map(StateStore(tmp_path).get, range(7)), strict=True):
            assert all(torch.equal(one.states[layer], other.states[layer]) for layer in AUX_LAYERS)


class TestDamage:
    """A flipped bit is noticed before anything learns from it, and costs one shard."""

    @pytest.mark.parametrize("where", ["states", "tokens", "header"])
    def test_a_flipped_bit(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        given = conversations(tiny_target)
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

    def test_a_look_at_all_of_it_leaves_it_in_its_place(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, conversations(tiny_target))
        assert store.damaged_files() == []
        flip(store.files[1], "states")
        assert store.damaged_files() == [store.files[1]]
        assert store.files[1].exists()

    def test_memory_that_is_short_says_nothing_of_a_shard(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = build(tmp_path, tiny_target, conversations(tiny_target))
        store = StateStore(tmp_path)

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)")

        monkeypatch.setattr(StateStore, "_part", fails)
        with pytest.raises(RuntimeError, match="Cannot allocate memory"):
            store.get(0)
        assert store.files[0].exists()

    def test_a_shard_that_goes_while_it_is_in_use(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, conversations(tiny_target))
        for file in store.files:
            file.unlink()
        with pytest.raises(UserError, match=r"is missing\..*data build"):
            store.get(0)


def poison(target: Target, monkeypatch: pytest.MonkeyPatch, *poisoned: Sequence[int]) -> None:
    """Have the target compute a NaN for these texts, as an overflow leaves it."""
    stock = target.hidden_states

    def hidden_states(rows: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> Any:
        states = stock(rows, aux_layers)
        for row, of_row in zip(rows, states, strict=True):
            if list(row) in map(list, poisoned):
                of_row[FINAL][3, 5] = torch.nan
        return states

    monkeypatch.setattr(target, "hidden_states", hidden_states)


@pytest.mark.parametrize("states_dtype", ["auto", "fp8"])
def test_conversations_with_states_that_are_not_finite_are_named_and_left_out(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states_dtype: str
) -> None:
    taken = conversations(tiny_target)
    poison(tiny_target, monkeypatch, taken[2].tokens, taken[5].tokens)
    for _ in range(2):  # the shards that are there say nothing of them
        store = build(tmp_path, tiny_target, taken, states_dtype=states_dtype)
        assert (len(store), store.dropped, store.not_finite) == (5, 0, {2: "c2", 5: "c5"})
        assert "2 conversations are left out" in store.notice and "'c2', 'c5'" in store.notice
        assert [store.number_of(index) for index in range(8)] == [0, 1, None, 2, 3, None, 4, None]
        for index, item in enumerate(taken):
            if (number := store.number_of(index)) is not None:
                sample = store.get(number)
                assert sample.tokens_T.tolist() == list(item.tokens)
                assert sample.supervised_T.tolist() == list(item.supervised)
                assert all(state_TE.isfinite().all() for state_TE in sample.states.values())
    with pytest.raises(UserError, match="not finite in any of 1 conversations"):
        build(tmp_path / "other", tiny_target, taken[2:3])
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_states_that_writing_brought_along_are_kept_only_where_they_are_finite(
    tiny_target: Target, tmp_path: Path
) -> None:
    taken = conversations(tiny_target, 3)
    states = tiny_target.hidden_states([item.tokens for item in taken], AUX_LAYERS)
    states[1][1][0, 0] = -torch.inf
    Capture(tmp_path, tiny_target, AUX_LAYERS).keep(list(zip(taken, states, strict=True)))
    keys = [tokens_key(item.tokens) for item in taken]
    lacking = ShardIndex(tmp_path, StateKind(tiny_target, AUX_LAYERS).owner).lacking(keys, AUX_LAYERS)
    assert lacking == {AUX_LAYERS: [keys[1]]}


def flip(file: Path, where: str) -> None:
    """One bit of a shard: of its states, its tokens or its lengths."""
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    names = json.loads(content[8 : 8 + header])
    start = 8 + content[8 : 8 + header].index(b"lengths") if where == "header" else 8 + header
    if where != "header":
        start += next(named["data_offsets"][0] for name, named in names.items() if name.startswith(where))
    content[start + 5] ^= 1
    file.write_bytes(content)


def test_a_large_store_has_few_shards_and_a_small_one_loses_little() -> None:
    for total in (10**6, 10**9, 20 * 10**9, 550 * 10**9, 5 * 10**12):
        assert total / shard_size(total) <= max(200, total / 2e9)
        assert 64e6 <= shard_size(total) <= 2e9


class TestCodes:
    """One byte a number, with a scale for each token."""

    @pytest.mark.parametrize(("states_dtype", "lost"), [("int8", 0.02), ("fp8", 0.05)])
    def test_states_come_back_but_for_rounding(
        self, tiny_target: Target, tmp_path: Path, states_dtype: str, lost: float
    ) -> None:
        given = conversations(tiny_target)
        plain = build(tmp_path / "plain", tiny_target, given)
        built = build(tmp_path / "codes", tiny_target, given, states_dtype=states_dtype)
        store = StateStore(tmp_path / "codes")
        assert store.bytes < 0.45 * plain.bytes, "float32 takes four bytes a number"
        assert store.fingerprint == built.fingerprint != plain.fingerprint, "heads of one are not those of the other"
        for i, item in enumerate(given):
            sample = store.get(i)
            assert sample.tokens_T.tolist() == list(item.tokens)
            for layer in AUX_LAYERS:
                exact_TE = plain.get(i).states[layer]
                assert sample.states[layer].dtype == exact_TE.dtype
                shares_T = (sample.states[layer] - exact_TE).norm(dim=-1) / exact_TE.norm(dim=-1)
                assert 0 < shares_T.max() < lost

    def test_size_is_as_estimated(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, conversations(tiny_target), states_dtype="fp8")
        expected = estimate_bytes(store.tokens, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype, "fp8")
        assert expected <= store.bytes <= expected + 1200 * len(list(tmp_path.glob("shard-*")))

    def test_the_budget_holds_more(self, tiny_target: Target, tmp_path: Path) -> None:
        given = conversations(tiny_target)
        budget = estimate_bytes(
            sum(len(item.tokens) for item in given[:3]), len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype
        )
        plain = build(tmp_path / "plain", tiny_target, given, budget_bytes=budget)
        assert (
            len(plain)
            == 3
            < len(build(tmp_path / "codes", tiny_target, given, budget_bytes=budget, states_dtype="int8"))
        )

    def test_they_lie_beside_those_stored_as_they_are(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target, 3)
        shards = tmp_path / "shards"
        plain = build(tmp_path / "plain", tiny_target, given, shards=shards)
        build(tmp_path / "codes", tiny_target, given, shards=shards, states_dtype="int8")
        forwards = Forwards(tiny_target, monkeypatch)
        build(tmp_path / "codes", tiny_target, given, shards=shards, states_dtype="int8")
        again = build(tmp_path / "plain", tiny_target, given, shards=shards)
        assert forwards.count == 0
        assert (again.files, again.fingerprint) == (plain.files, plain.fingerprint)

    def test_a_flipped_scale_is_noticed(self, tiny_target: Target, tmp_path: Path) -> None:
        store = build(tmp_path, tiny_target, conversations(tiny_target), states_dtype="int8")
        flip(store.files[0], "scales")
        with pytest.raises(UserError, match="is damaged"):
            for i in range(len(store)):
                StateStore(tmp_path).get(i)


class TestMore:
    """Shards are only ever added: what one of them holds is not computed again."""

    def test_more_conversations(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = conversations(tiny_target)
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

    def test_fewer_or_equal_conversations(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target)
        build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        forwards = Forwards(tiny_target, monkeypatch)
        store = build(tmp_path / "two", tiny_target, [given[5], given[2], given[5]], shards=tmp_path / "shards")
        assert forwards.count == 0
        assert [store.get(i).tokens_T.tolist() for i in range(3)] == [list(given[i].tokens) for i in (5, 2, 5)]

    def test_another_layer_alone(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = conversations(tiny_target)
        first = build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        asked: list[tuple[int, ...]] = []
        stock = tiny_target.hidden_states

        def hidden_states(rows: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> object:
            asked.append(tuple(aux_layers))
            return stock(rows, aux_layers)

        monkeypatch.setattr(tiny_target, "hidden_states", hidden_states)
        store = build(tmp_path / "two", tiny_target, given, aux_layers=(2, *AUX_LAYERS), shards=tmp_path / "shards")
        assert set(asked) == {(2,)}
        assert store.aux_layers == (2, *AUX_LAYERS)
        assert store.fingerprint == first.fingerprint, "the same texts, whatever is kept of them"
        for i, conversation in enumerate(given):
            (expected,) = stock([conversation.tokens], store.aux_layers)
            for layer in store.aux_layers:
                torch.testing.assert_close(store.get(i).states[layer], expected[layer], rtol=1e-4, atol=1e-5)

    def test_another_mask_is_another_store_of_the_same_states(
        self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = conversations(tiny_target, 3)
        first = build(tmp_path / "one", tiny_target, given, shards=tmp_path / "shards")
        forwards = Forwards(tiny_target, monkeypatch)
        masked = [Conversation(c.id, c.tokens, [*c.supervised[:-1], True], c.messages) for c in given]
        store = build(tmp_path / "two", tiny_target, masked, shards=tmp_path / "shards")
        assert forwards.count == 0
        assert store.fingerprint != first.fingerprint
        assert [store.get(i).supervised_T.tolist() for i in range(3)] == [list(item.supervised) for item in masked]
        assert [mask.tolist() for mask in store.supervised()] == [list(item.supervised) for item in masked]

    def test_the_states_of_another_target_are_its_own(self, tiny_target: Target, tmp_path: Path) -> None:
        given = conversations(tiny_target)
        first = build(tmp_path, tiny_target, given)
        other = Target(tiny_model("llama", 1, tiny_target.vocab_size, 1024), tiny_target.tokenizer)
        store = build(tmp_path, other, given)
        assert store.fingerprint != first.fingerprint
        (expected,) = other.hidden_states([given[0].tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:
            torch.testing.assert_close(store.get(0).states[layer], expected[layer], rtol=1e-4, atol=1e-5)

    def test_files_of_others_stay(self, tiny_target: Target, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        build(tmp_path, tiny_target, conversations(tiny_target, 2))
        build(tmp_path, tiny_target, conversations(tiny_target, 3))
        assert (tmp_path / "notes.txt").read_text() == "mine"


class TestBudget:
    def test_the_last_conversations_are_left_out(self, tiny_target: Target, tmp_path: Path) -> None:
        given = conversations(tiny_target)
        per_token = estimate_bytes(1, len(AUX_LAYERS), tiny_target.hidden_size, tiny_target.dtype)
        budget = per_token * sum(len(item.tokens) for item in given[:4]) + per_token
        store = build(tmp_path, tiny_target, given, budget_bytes=budget)
        assert (len(store), store.dropped) == (4, 3)
        assert store.notice.startswith("The byte budget holds 4 of 7 conversations")
        assert store.get(3).tokens_T.tolist() == list(given[3].tokens)

    def test_not_even_one(self, tiny_target: Target, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"does not hold one conversation .*cache_gigabytes"):
            build(tmp_path, tiny_target, conversations(tiny_target), budget_bytes=1000)

    def test_too_little_disk(self, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            free = 1000

        monkeypatch.setattr(headstart.support.files.shutil, "disk_usage", lambda _place: Full)
        with pytest.raises(UserError, match=r"Keeping hidden states needs .* and 1.0 kB are free"):
            build(tmp_path / "store", tiny_target, conversations(tiny_target))
        assert not (tmp_path / "store").exists()


class TestRefusals:
    def test_conversations_that_cannot_be_stored(self, tiny_target: Target, tmp_path: Path) -> None:
        def refuse(match: str, *tokens: int, supervised: bool = True) -> None:
            given = [Conversation("odd", list(tokens), [supervised] * len(tokens), [])]
            with pytest.raises(UserError, match=match):
                build(tmp_path, tiny_target, given)

        refuse("Nothing is supervised in conversation 'odd'", 1, 2, supervised=False)
        refuse("'odd' has 1025 tokens; the context of tiny is 1024", *[1] * 1025)
        refuse("'odd' holds token 5000", 1, 5000)
        with pytest.raises(UserError, match="no conversations"):
            build(tmp_path, tiny_target, [])

    def test_an_aux_layer_that_does_not_exist(self, tiny_target: Target, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="Layer 9 does not exist"):
            build(tmp_path, tiny_target, conversations(tiny_target, 1), aux_layers=(9,))

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text('{"format": 4}')
        with pytest.raises(UserError, match="another format"):
            StateStore(tmp_path)
        (tmp_path / "manifest.json").write_text('{"format"')
        with pytest.raises(UserError, match="not valid JSON"):
            StateStore(tmp_path)
