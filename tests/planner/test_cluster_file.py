"""Each key of a cluster file, with a value of another kind, is refused by its name in one line."""

import dataclasses

import pytest
import yaml

from hf_parallel.ask.config import SpecError
from hf_parallel.planner.groups import read_machines
from hf_parallel.planner.hardware import Efficiency

LINK = {"name": "mine", "gb_s": 6.2, "latency_us": 12, "source": "measured"}
GPU = {
    "like": "h100-80gb",
    "name": "mine",
    "tflops": {"bf16": 500},
    "memory_gib": 94.0,
    "bandwidth": 3000,
    "units": 132,
    "scale_up": "nvlink4",
    "scale_out": "ethernet-25g",
    "host": {
        "name": "mine",
        "pcie_gb_s": 50,
        "bandwidth_gb_s": 100,
        "nvme_gb_s": 10,
        "memory_gib": 500,
        "source": "own",
    },
    "capability": [9, 0],
    "efficiency": dataclasses.asdict(Efficiency()),
    "source": "own",
}
WHOLE = {"gpu": GPU, "gpus": 8, "gpus_per_node": 4, "inside": "nvlink4", "network": LINK}


def keys(values=WHOLE, before=()):
    """The way to each key of the file, of mappings and of what they hold."""
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys(value, (*before, key))


def replaced(way, value, values=WHOLE):
    first, *rest = way
    return {**values, first: replaced(rest, value, values[first]) if rest else value}


def written(tmp_path, values):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_all_keys_are_taken(tmp_path):
    cluster = read_machines(written(tmp_path, WHOLE))
    assert (cluster.gpu.capability, cluster.gpu.host.nvme, cluster.between.name) == ((9, 0), 10e9, "mine")


@pytest.mark.parametrize("wrong", [9.0, -1, "x", True, None, [1], {"x": "y"}], ids=str)
def test_a_value_of_another_kind(tmp_path, wrong):
    """Whatever is neither taken nor refused ends in another error; a kind that the key has too may be taken."""
    for way in keys():
        message = _refused(written(tmp_path, replaced(way, wrong)))
        if message is None:
            assert _may_be(way[-1], wrong), way
        else:
            named = {
                "bf16": "tflops",
                "inside": "network",
                "scale_up": "network",
                "scale_out": "network",
                "like": "gpu",
            }.get(way[-1], "")
            assert way[-1] in message or (named and named in message), (way, message)
            assert "\n" not in message


def _refused(path):
    try:
        read_machines(path)
    except SpecError as error:
        return str(error)
    return None


def _may_be(key, value):
    texts = ("name", "source", "scale_up", "scale_out")  # the links are given
    if key in texts:
        return isinstance(value, str)
    return value == 9.0 and not isinstance(value, (bool, list, dict, str)) and key not in ("gpus", "capability")


@pytest.mark.parametrize(
    ("way", "value", "words"),
    [
        (("gpu", "capability"), 9.0, "gpu: capability=9.0: is not two whole numbers; [9, 0] works"),
        (("gpus_per_node",), 2.5, "gpus_per_node=2.5: is not a whole number above 0"),
        (("gpu", "host"), "castle", "host=castle: not in the catalogue; server-pcie4"),
        (("network",), {"name": "mine"}, "gb_s, latency_us is missing"),
        (("network",), {**LINK, "gbs": 1}, "gbs is no key"),
    ],
)
def test_what_it_says(tmp_path, way, value, words):
    with pytest.raises(SpecError) as caught:
        read_machines(written(tmp_path, replaced(way, value)))
    assert words in str(caught.value)
