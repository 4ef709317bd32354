"""Adapters on a base in 4 bits, offloaded: what the same layout computes that offloads nothing."""

from functools import partial

import pytest

from tests.distributed import run
from tests.parity.test_qlora import folder, train  # noqa: F401 - a fixture
from tests.training import axes


@pytest.mark.parametrize("way", ["cpu", "optimizer", "nvme:FILES", "nvme_all:FILES"])
def test_same_numbers_as_resident(folder, tmp_path, way):  # noqa: F811
    found, layout = [], "tp=2,dp_shard=2"
    for more in ("", f",offload={way}".replace("FILES", str(tmp_path / "files"))):
        call = partial(train, f"{layout}{more}", folder, str(tmp_path / f"out{len(found)}"), {})
        logs, keys, stored, _ = run(call, axes(layout)["world"], init=False)[0]
        found.append((logs, keys, stored))
    resident, offloaded = found
    assert offloaded[1:] == resident[1:]
    for ours, theirs in zip(offloaded[0], resident[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # the same operations on the same shards
