"""The catalogue beside the makers' data sheets, written down once more."""

import pytest

from hf_parallel.planner.hardware import find_gpu, find_link, read_catalogue

#: Dense tensor TFLOP/s in bf16 (V100: fp16), GB/s of memory, GB/s of the link in the node and direction.
SHEETS = {
    "V100": (125, 900, 150),
    "A100-40GB": (312, 1555, 300),
    "A100-80GB": (312, 2039, 300),
    "H100-SXM": (1979 / 2, 3350, 450),
    "H100-PCIe": (1513 / 2, 2000, 63),
    "H200": (1979 / 2, 4800, 450),
    "B200": (4500 / 2, 7700, 900),
    "L40S": (733 / 2 * 0.988, 864, 31.5),
    "RTX-4090": (330.3 / 2, 1008, 15.75),
    "RTX-3090": (142 / 2, 936, 15.75),
    "MI300X": (1307.4, 5300, 448),
}


@pytest.mark.parametrize("name", SHEETS)
def test_numbers_of_the_data_sheets(name):
    gpu, (tflops, bandwidth, link) = find_gpu(name), SHEETS[name]
    assert gpu.peak("bf16") / 1e12 == pytest.approx(tflops, rel=0.002)
    assert gpu.bandwidth / 1e9 == bandwidth
    assert find_link(gpu.scale_up).bandwidth / 1e9 == link
    assert gpu.peak("fp32") < gpu.peak("bf16") <= gpu.peaks.get("fp8", 1e18)


def test_every_entry_has_a_source():
    assert all(find_gpu(name).source for name in read_catalogue()["gpus"])
    assert all(find_link(name).source for name in read_catalogue()["links"])
    assert all(find_gpu(name).host.source for name in read_catalogue()["gpus"])


@pytest.mark.parametrize(
    ("name", "gbit"),
    [("ethernet-25g", 25), ("ethernet-100g", 100), ("omni-path", 4 * 100), ("infiniband-hdr", 8 * 200)]
    + [("infiniband-ndr", 8 * 400), ("roce-400g", 8 * 400)],
)
def test_adapters_are_shared_by_eight_gpus(name, gbit):
    assert find_link(name).bandwidth == pytest.approx(gbit / 8 * 1e9 / 8)


def test_only_measured_types_have_efficiencies_of_their_own():
    """What nobody published rows on says whose it borrows."""
    own = {name for name, entry in read_catalogue()["gpus"].items() if "efficiency" in entry}
    assert own == {"a100-80gb", "h100-80gb"}
    borrowed = {name: find_gpu(name).like for name in read_catalogue()["gpus"]}
    assert {like for like in borrowed.values() if like} == own
    assert {name for name, like in borrowed.items() if not like} == own | {
        "a100-40gb",
        "a800-80gb",
        "h100-96gb-hbm2e-500w",
    }
