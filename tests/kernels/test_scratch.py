"""Scratch buffers of the C kernels: freed with their thread, and an allocation failure raises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from headstart.kernels import cpu_attention, draft_kernels, prepacked
from tests.forks import Forks

pytestmark = pytest.mark.skipif(draft_kernels.compiled(torch.float32) is None, reason="needs a C compiler and AVX2")
THREADS = 60


def choose() -> None:
    draft_kernels.argmax(torch.zeros(30_000, 2))


def multiply() -> None:
    prepacked.product(torch.zeros(8, 16_000), prepacked.prepack(torch.zeros(32, 16_000)), None)


def attend() -> None:
    queries, keys = torch.zeros(1, 12, 1, 64), torch.zeros(1, 1, 16_000, 64)
    assert cpu_attention.few_tokens_attention(queries, keys, keys, torch.tensor([16_000]), 1.0) is not None


@pytest.mark.parametrize(("kernel", "threads"), [(choose, 1), (multiply, 1), (attend, 1), (multiply, 2)])
def test_scratch_buffers_are_freed_with_their_thread(kernel: Callable[[], None], threads: int) -> None:
    def work() -> None:
        torch.set_num_threads(threads)
        kernel()

    def resident() -> int:
        for _ in range(THREADS):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return int(psutil.Process().memory_info().rss)

    before = resident()
    # Each thread takes at least 0.5 MB. The threads of an OpenMP team end some time after their parent thread.
    assert resident() - before < threads * THREADS << 18


WITHOUT_MEMORY = """
import resource, torch
from headstart.kernels import cpu_attention, draft_kernels, prepacked

torch.set_num_threads(2)
logits, rows, packed = torch.zeros(1 << 22, 2), torch.zeros(1 << 18, 128), prepacked.prepack(torch.zeros(32, 128))
queries, keys = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1 << 23, 16)
kernels = {
    "choose": lambda count: draft_kernels.argmax(logits[:count]),
    "multiply": lambda count: prepacked.product(rows[:count], packed, None),
    "attend": lambda count: cpu_attention.few_tokens_attention(
        queries, keys[:, :, :count], keys[:, :, :count], torch.tensor([min(count, 1 << 23)]), 1.0
    ),
}
for kernel in kernels.values():
    kernel(64)  # loads its library and starts its threads
used = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
for name, kernel in kernels.items():
    # The result fits, 32 MB at most, and malloc's arena of another thread; the scratch buffer takes 128 MB at least.
    resource.setrlimit(resource.RLIMIT_AS, (used + (112 << 20), resource.RLIM_INFINITY))
    try:
        kernel(1 << 23)
    except MemoryError as error:
        print(name, error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    kernel(64)
"""


def test_kernel_out_of_memory_raises_and_recovers(forks: Forks) -> None:
    done = forks.run("-c", WITHOUT_MEMORY)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert told.keys() == {"choose", "multiply", "attend"}
    assert set(told.values()) == {"A kernel cannot allocate its scratch buffers: shorten the prompt, or batch less."}
