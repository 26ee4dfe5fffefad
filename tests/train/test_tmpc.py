import pytest,torch,torch._dynamo.testing
from headstart.model.model import Target
from headstart.train.batches import sample_anchors, subsample
from headstart.support import regions
from tests.heads.test_contract import CASES, build, shake
from tests.train.test_packing import target, store_of, CPU
from tests.train.test_long_texts import assert_same_step, learn
from headstart.train.batches import read_batch
from headstart.replay.patch import FINAL
from functools import cache
@pytest.mark.parametrize("name", CASES)
def test_eq(name,target,flex_on_cpu,monkeypatch):
    count=torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(regions,"compile_region",cache(lambda f: torch.compile(f,backend=count)))
    heads=shake(build(name,target)); layers=sorted({*heads.aux_layers,FINAL})
    for lengths in ([23,2,40,1,9,17],[30,5,44],[60,20],[70,22]):
        store=store_of(target,heads,lengths); idx=list(range(len(lengths)))
        padded=read_batch(store,idx,layers).on(CPU,torch.float32)
        packed=read_batch(store,idx,layers,True,100).on(CPU,torch.float32)
        heads.compiled=False
        want=learn(target,heads,padded)
        heads.compiled=True
        got=learn(target,heads,packed)
        assert_same_step(got,want)
        print(name,lengths,count.frame_count)
