"""The tensor memory cache: freed memory is reused, never shared, and bounded."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headstart.support.compiled import compiler
from headstart.train import tensor_memory
from headstart.train.tensor_memory import cache_tensor_memory

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not compiler() or tensor_memory._allocator() is None,
    reason="no compiler for C++, or another C library than glibc",
)


def test_freed_memory_is_reused_for_the_same_size() -> None:
    with cache_tensor_memory(CPU):
        for numbers in (1, 15, 16, 17, 250, 4097, 1_000_003):
            freed = torch.empty(numbers)
            place = freed.data_ptr()
            assert place % 64 == 0
            del freed
            again = torch.empty(numbers)
            assert again.data_ptr() == place
            other = torch.empty(numbers)
            assert other.data_ptr() != place, "still in use"


def test_kept_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "free_bytes", lambda device: 50_000 / tensor_memory._FRACTION)
    allocator = tensor_memory._allocator()
    with cache_tensor_memory(CPU):
        assert allocator.set_cache_limit(50_000) == 0
        sizes = 10_000, 20_000, 30_000  # blocks of 10,240, 20,480 and 30,720
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for kept in (30_720, 20_480, 30_720):
            del tensors[-1]  # the second does not fit beside the first
            assert allocator.set_cache_limit(50_000) == kept
        large = torch.empty(60_000, dtype=torch.uint8)
        del large  # larger than the bound
        assert allocator.set_cache_limit(50_000) == 0
    assert allocator.set_cache_limit(0) == 0


def test_tensors_do_not_overlap() -> None:
    """Tensors of many sizes, created and freed in several threads, keep their contents."""

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for step in range(600):
            size = int(2 ** (16 * torch.rand((), generator=generator).item()))
            held.append((torch.full((size,), seed * 1000 + step), seed * 1000 + step))
            if len(held) > 40:
                tensor, number = held.pop(int(torch.randint(len(held), (), generator=generator)))
                if not bool((tensor == number).all()):
                    return False
        return all(bool((tensor == number).all()) for tensor, number in held)

    with cache_tensor_memory(CPU), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_tensors_outlive_the_context() -> None:
    older = torch.arange(1000)
    with cache_tensor_memory(CPU):
        inside = torch.arange(1000) * 2
        del older
        empty = torch.empty(0)
        grown = torch.empty(3).resize_(5000).fill_(7)
    assert inside.sum() == 999_000 and empty.numel() == 0 and bool((grown == 7).all())
    del inside, grown
    after = torch.arange(1000)
    with cache_tensor_memory(CPU):
        assert after.sum() == 499_500


def test_impossible_size_is_torchs_own_error() -> None:
    for size in (1 << 60, -1, -100):
        with cache_tensor_memory(CPU), pytest.raises(RuntimeError, match=r"memory|negative|nbytes"):
            torch.UntypedStorage(size)


def test_other_devices_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "_allocator", lambda: pytest.fail("not on a GPU"))
    with cache_tensor_memory(torch.device("cuda")):
        assert torch.ones(3).sum() == 3
