"""Numbers in fewer bits: how far they are from what they stand for, and what refuses to be hidden."""

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ranks import all_to_all
from hf_parallel.ranks.all_to_all import BLOCK, count_packed_bytes, pack_rows, unpack

#: Half a step of the codes, relative to the largest number of a block; 2^-9 more for the scale, which has 8 bits.
ROUNDING = {"int8": 0.5 / 127 + 2**-9, "int4": 0.5 / 7 + 2**-9, "fp8": 2**-4 + 2**-9}
ODD = 515


def numbers(rows: int = 3, count: int = ODD) -> torch.Tensor:
    """Blocks whose sizes differ by powers of ten, one of them zero."""
    drawn = torch.randn(rows, count, generator=torch.Generator().manual_seed(0))
    drawn[:, :BLOCK] *= 1e6
    drawn[:, BLOCK : 2 * BLOCK] *= 1e-6
    drawn[:, 2 * BLOCK : 3 * BLOCK] = 0
    return drawn


@pytest.mark.parametrize("kind", list(ROUNDING))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_is_within_half_a_step_of_its_block(kind, dtype):
    given = numbers()
    packed = pack_rows(given, kind)
    assert packed.shape == (3, count_packed_bytes(ODD, kind))
    values = unpack(packed, ODD, kind, dtype).float()
    if dtype == torch.float16:  # has no 1e6
        given, values = given[:, BLOCK:], values[:, BLOCK:]
    own = 2**-8 if dtype == torch.bfloat16 else 2**-11 if dtype == torch.float16 else 0.0
    for start in range(0, given.shape[1], BLOCK):
        block, found = given[:, start : start + BLOCK], values[:, start : start + BLOCK]
        largest = block.abs().amax(1, keepdim=True)
        # the last term: fp16's smallest steps
        assert ((found - block).abs() <= largest * (ROUNDING[kind] + own) + 6e-8).all(), (kind, dtype, start)


@pytest.mark.parametrize("kind", list(ROUNDING))
def test_pieces_are_packed_as_the_whole(kind, monkeypatch):
    whole = pack_rows(numbers(), kind)
    for piece in (1, 3 * BLOCK * 2, 3 * 500):
        monkeypatch.setattr(all_to_all, "PIECE", piece)
        assert torch.equal(pack_rows(numbers(), kind), whole)


@pytest.mark.parametrize("kind", list(ROUNDING))
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_overflowed_stays_so(kind, bad):
    given = numbers()
    given[1, 3] = bad
    values = unpack(pack_rows(given, kind), ODD, kind)
    assert not values[1, :BLOCK].isfinite().any()
    assert values[0].isfinite().all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quantize_weights=true", ["quantize_weights=true", "int8", "fp8"]),
        ("gradient_error_feedback=true", ["gradient_error_feedback=true", "quantize_gradients=int4"]),
        ("hierarchical_shard=2,zero_stage=2", ["hierarchical_shard=2", "zero_stage=2", "zero_stage=3"]),
        ("hierarchical_shard=1", ["hierarchical_shard=1", "hierarchical_shard=2"]),
    ],
)
def test_refused_by_name(spec, words):
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(spec)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
