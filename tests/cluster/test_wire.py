import pytest
import torch

from labkit.cluster.wire import pack, unpack

ODD = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_bits_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    sent = {
        "odd": ODD.to(dtype) if dtype.is_floating_point else torch.arange(4).to(dtype),
        "sizes that align nothing": torch.randn(3, 7).to(dtype),
        "scalar": torch.tensor(2).to(dtype),
        "empty": torch.zeros(0, 5, dtype=dtype),
        "transposed": torch.randn(4, 3).to(dtype).t(),
    }
    got = unpack(pack(sent))
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == dtype
        assert got[name].shape == tensor.shape
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (got[name], tensor)]
        assert torch.equal(*bits), name


def test_what_arrived_can_be_written_to() -> None:
    packed = pack({"w": torch.ones(8)})
    packed.data.flags.writeable = False  # as everything in the object store is
    got = unpack(packed)["w"]
    got += 1
    assert torch.equal(unpack(packed)["w"], torch.ones(8))
