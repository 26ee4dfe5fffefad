"""The stand-in device computes as the CPU does, counts what a CUDA device would make slow, and refuses mixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.standin import CUDA, Counts, MixedDevices, StandIn

WORK: dict[str, tuple[Callable[[Tensor], object], Counts]] = {
    "reading a number": (lambda x: x[0, 0].item(), Counts(waits=1)),
    "asking for a number": (lambda x: float(x[0, 0]), Counts(waits=1)),
    "asking whether": (lambda x: bool((x > 0).all()), Counts(waits=1, launches=2)),
    "reading a list": (lambda x: x.tolist(), Counts(waits=1)),
    "reading all": (lambda x: x.cpu(), Counts(waits=1)),
    "reading in another dtype": (lambda x: x.to("cpu", torch.float64), Counts(waits=1)),
    "writing into a host tensor": (lambda x: torch.zeros(2, 3).copy_(x), Counts(waits=1)),
    "comparing": (lambda x: torch.equal(x, x), Counts(waits=1, launches=1)),
    "looking for places": (lambda x: x.nonzero(), Counts(waits=1, launches=1)),
    "taking by a mask": (lambda x: x[x > 0], Counts(waits=1, launches=2)),
    "giving by a mask": (lambda x: x.index_put_((x > 0,), x[x > 0]), Counts(waits=2, launches=4)),
    "filling by a mask": (lambda x: x.__setitem__(x > 0, 1.0), Counts(launches=2)),
    "making a tensor of numbers": (lambda x: torch.tensor([1, 2], device=CUDA), Counts(uploads=1, slow_uploads=1)),
    "sending a tensor": (lambda x: torch.ones(2, 3).to(x), Counts(uploads=1, slow_uploads=1)),
    "sending without an index": (lambda x: torch.ones(2, 3).to("cuda"), Counts(uploads=1, slow_uploads=1)),
    "sending unpinned": (lambda x: torch.ones(2).to(CUDA, non_blocking=True), Counts(uploads=1, slow_uploads=1)),
    "sending pinned": (lambda x: torch.ones(2).pin_memory().to(CUDA, non_blocking=True), Counts(uploads=1)),
    "writing from a host tensor": (lambda x: x.copy_(torch.ones(2, 3)), Counts(uploads=1, slow_uploads=1)),
    "taking by a list": (lambda x: x[[0, 1]], Counts(uploads=1, slow_uploads=1, launches=1)),
    "taking by a host tensor": (lambda x: x[torch.tensor([0, 1])], Counts(uploads=1, slow_uploads=1, launches=1)),
    "views": (lambda x: x.t()[1:, None].expand(2, 4, 2).detach(), Counts()),
    "making room": (lambda x: torch.empty(3, device=CUDA), Counts()),
    "filling": (lambda x: torch.zeros(3, device="cuda"), Counts(launches=1)),
    "a number of the host": (lambda x: x + torch.tensor(2.0), Counts(launches=1)),
    "staying there": (lambda x: x.to("cuda").to(CUDA).to(torch.float32), Counts()),
    "another dtype": (lambda x: x.to(torch.float64), Counts(launches=1)),
    "a product": (lambda x: torch.nn.functional.linear(x, x), Counts(launches=1)),
}


@pytest.mark.parametrize("what", WORK)
@pytest.mark.parametrize("inference", [True, False])
def test_work_is_counted(what: str, inference: bool, device: StandIn) -> None:
    work, expected = WORK[what]
    with torch.inference_mode(inference):
        x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, -6.0]], device=CUDA)
        before = device.counts
        work(x)
    assert device.counts - before == expected


def test_attention_is_one_kernel_while_decoding(device: StandIn) -> None:
    """Recorded for gradients it is taken apart."""
    x = torch.randn(1, 2, 5, 8)
    with torch.inference_mode():
        there = x.cuda()
        before = device.counts
        found = torch.nn.functional.scaled_dot_product_attention(there, there, there, is_causal=True)
        assert (device.counts - before).launches == 1
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(found.cpu(), expected)


MIXTURES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda x, host: x + host,
    "sum the other way round": lambda x, host: host + x,
    "product": lambda x, host: torch.nn.functional.linear(x, host),
    "join": lambda x, host: torch.cat([x, host]),
    "in place": lambda x, host: x.add_(host),
    "embedding": lambda x, host: torch.nn.functional.embedding(torch.tensor([0]), x),
    "gather": lambda x, host: x.gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "host tensor by a device index": lambda x, host: host[x.long().clamp(0, 1)],
    "noise of the host": lambda x, host: x.uniform_(generator=torch.Generator()),
    "new noise of the host": lambda x, host: torch.rand(2, generator=torch.Generator(), device=CUDA),
}


@pytest.mark.parametrize("what", MIXTURES)
@pytest.mark.parametrize("inference", [True, False])
def test_mixtures_are_refused(what: str, inference: bool, device: StandIn) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(2, 3, device=CUDA)
        with pytest.raises(MixedDevices):
            MIXTURES[what](x, torch.ones(2, 3))


def test_numpy_asks_for_a_copy_first(device: StandIn) -> None:
    x = torch.ones(2, device=CUDA)
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1.0, 1.0]


def test_writes_through_views_are_seen(device: StandIn) -> None:
    x = torch.zeros(2, 3, device=CUDA)
    x[0, 1:] = 4.0
    x.view(-1)[3] = 5.0
    assert x.tolist() == [[0.0, 4.0, 4.0], [5.0, 0.0, 0.0]]


def test_a_module_moves_and_learns(device: StandIn) -> None:
    torch.manual_seed(0)
    host = torch.nn.Linear(3, 2)
    moved = torch.nn.Linear(3, 2)
    moved.load_state_dict(host.state_dict())
    before = list(moved.parameters())
    moved = moved.to("cuda")
    assert all(old is new for old, new in zip(before, moved.parameters(), strict=True)), "an optimizer may hold them"
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in moved.parameters())
    x = torch.randn(4, 3)
    for module, data in ((host, x), (moved, x.cuda())):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            module(data).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(moved.weight.cpu(), host.weight)


def test_events_say_where(device: StandIn) -> None:
    torch.ones(2, device=CUDA).sum().item()
    assert [event.kind for event in device.events] == ["wait"]
    assert device.events[0].where.startswith("tests/test_standin.py:")


def test_outside_nothing_is_left() -> None:
    with StandIn():
        pass
    assert type(torch.ones(2)) is Tensor
    assert torch.Generator is not None and torch.Generator().device.type == "cpu"
    assert not torch.__future__.get_swap_module_params_on_conversion()
