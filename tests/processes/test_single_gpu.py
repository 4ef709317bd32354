"""`benchmarks/single_gpu.py` on the CPU: it runs small and prints its table; and what it says of figures."""

import json

import pytest

from benchmarks import single_gpu
from benchmarks.gpu import setting
from tests.unit.test_gpu_parts import forked


def test_the_table_without_a_gpu(tmp_path, monkeypatch, capsys):
    """LoRA only and once: the longest settings of a side, so that the smoke test takes seconds."""
    pytest.importorskip("peft")
    few = [one for one in single_gpu.settings() if one.name in ("sdpa, checkpointing", single_gpu._OURS[1])]
    monkeypatch.setattr(single_gpu, "settings", lambda: few)
    monkeypatch.setattr(setting.Setting, "here", classmethod(lambda cls: cls(0, True, run=forked)))
    assert single_gpu.main(["lora", "--rounds=1", f"--out={tmp_path / 'out.json'}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no GPU here")
    assert single_gpu.HEAD in printed
    found = json.loads((tmp_path / "out.json").read_text())["tiny lora"]
    assert [one["who"] for one in found] == ["plain Trainer", "hf_parallel"]
    assert all(one["tokens_per_s"] > 0 and one["bytes"] > 0 for one in found)
    assert printed.count("| tiny lora, 1 x 65 |") == 3
    assert " x tokens/s, " in printed


def side(who: str, speed: float, size: float) -> dict:
    return {"who": who, "settings": "", "tokens_per_s": speed, "bytes": size}


@pytest.mark.parametrize(
    ("ours", "says"),
    [((130, 10), "target met"), ((100, 6), "target met"), ((110, 8), "target not met"), ((90, 11), "worse in both")],
)
def test_the_target(ours, says):
    plain = [side("plain Trainer", 100, 10), side("plain Trainer", 50, 2)]
    assert single_gpu.verdict([*plain, side("hf_parallel", *ours)]).endswith(says)
    assert single_gpu.verdict([*plain, {"who": "hf_parallel", "error": "out of memory"}]) == "only plain Trainer fits"


def test_of_equally_fast_settings_the_leanest_counts():
    found = [side("hf_parallel", 100, 10), side("hf_parallel", 98, 5), side("hf_parallel", 80, 1)]
    assert single_gpu.best(found, "hf_parallel") == found[1]
