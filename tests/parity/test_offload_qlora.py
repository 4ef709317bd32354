"""Adapters on a base in 4 bits, offloaded: what the same layout computes that offloads nothing."""

from functools import partial

import pytest

from tests.distributed import run
from tests.parity.test_qlora import folder, train  # noqa: F401 - a fixture
from tests.training import Tolerance, axes, differences, none

SAME = Tolerance(1e-6, 1e-6, 1e-6)  # the same operations on the same shards


@pytest.mark.parametrize("way", ["cpu", "optimizer", "nvme:FILES", "nvme_all:FILES"])
def test_same_numbers_as_resident(folder, tmp_path, way):  # noqa: F811
    found, layout = [], "tp=2,dp_shard=2"
    for more in ("", f",offload={way}".replace("FILES", str(tmp_path / "files"))):
        call = partial(train, f"{layout}{more}", str(tmp_path / f"out{len(found)}"), folder, "single")
        found.append(run(call, axes(layout)["world"], init=False)[0])
    resident, offloaded = found
    none(differences([offloaded], resident, SAME))
    assert (offloaded.gradient_keys, offloaded.more) == (resident.gradient_keys, resident.more)
