"""What `--detect` makes of a machine with GPUs: the driver's own texts, and a torch that pretends to see them."""

import types

import pytest
import torch

from hf_parallel.ask.config import SpecError
from hf_parallel.planner import detect as detecting
from hf_parallel.planner.detect import detect, read_topology
from hf_parallel.planner.hardware import find_gpu, find_link, make_cluster


def shown(rows, tail="0-63\t0\t\tN/A", nics=0):
    """The text of `nvidia-smi topo -m`, tabs, underlined heading, adapters and legend as the driver prints them."""
    names = [f"GPU{i}" for i in range(len(rows))] + [f"NIC{i}" for i in range(nics)]
    heading = "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    lines = [f"GPU{i}\t" + "\t".join([*row.split(), *["PXB"] * nics]) + f"\t{tail}" for i, row in enumerate(rows)]
    lines += [f"NIC{i}\t" + "\t".join(["PXB"] * len(rows) + ["X"]) for i in range(nics)]
    legend = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    return "\n".join([heading, *lines, legend, "  NV#  = Connection traversing a bonded set of # NVLinks\n"])


def switched(count, word):
    return [" ".join("X" if i == j else word for j in range(count)) for i in range(count)]


CUBE = [  # DGX-1: six links per V100, no link between some
    "X NV1 NV1 NV2 NV2 SYS SYS SYS",
    "NV1 X NV2 NV1 SYS NV2 SYS SYS",
    "NV1 NV2 X NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X SYS SYS SYS NV1",
    "NV2 SYS SYS SYS X NV1 NV1 NV2",
    "SYS NV2 SYS SYS NV1 X NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X NV2",
    "SYS SYS SYS NV1 NV2 NV1 NV2 X",
]
PAIRS = ["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"]
SOCKETS = ["X NODE SYS SYS", "NODE X SYS SYS", "SYS SYS X NODE", "SYS SYS NODE X"]


@pytest.fixture
def machine(monkeypatch):
    """A machine with `count` GPUs of a name, whose driver says `rows` and `lanes`."""

    def make(name, count, rows=None, lanes="4, 16", memory=79.3, nics=0):
        about = types.SimpleNamespace(name=name, total_memory=int(memory * 2**30))
        module = types.SimpleNamespace(get_device_properties=lambda index: about)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
        monkeypatch.setattr(detecting, "_find_network_adapters", lambda gpus: None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        texts = {
            "topo": shown(rows, nics=nics) if rows else "",
            "--query-gpu=pcie.link.gen.max,pcie.link.width.max": lanes,
        }
        monkeypatch.setattr(detecting, "_run_nvidia_smi", lambda *argv: texts[argv[0]])

    return make


@pytest.mark.parametrize(
    ("name", "rows", "link", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-80GB", switched(8, "NV12"), "nvlink3", 300),
        ("NVIDIA A100-SXM4-40GB", switched(4, "NV4"), "nvlink3", 300),  # no switch: three neighbours, four links each
        ("NVIDIA H100 80GB HBM3", switched(8, "NV18"), "nvlink4", 450),
        ("NVIDIA H100 80GB HBM3", switched(2, "NV6"), "6 x nvlink4", 150),
        ("Tesla V100-SXM2-32GB", CUBE, "nvlink2", 150),
        ("NVIDIA A100-SXM4-80GB", SOCKETS, "pcie4", 31.5),  # NVLink is there and off
        ("NVIDIA L40S", SOCKETS, "pcie4", 31.5),
        ("NVIDIA GeForce RTX 4090", switched(4, "PHB"), "pcie4-through-host", 15.75),
        ("NVIDIA GeForce RTX 3090", PAIRS, "pcie4-through-host", 15.75),  # bridges join pairs, no ring
        ("NVIDIA GeForce RTX 3090", switched(2, "NV4"), "4 x nvlink3-bridge", 56.25),
        ("NVIDIA A100 80GB PCIe", switched(2, "NV12"), "12 x nvlink3", 300),
        ("NVIDIA H100 PCIe", SOCKETS, "pcie4", 31.5),  # in a board of the generation before
    ],
)
def test_links_inside_a_node(machine, name, rows, link, gigabytes):
    machine(name, len(rows), rows, nics=2)
    cluster = detect()
    assert cluster.inside.name == link
    assert cluster.inside.bandwidth == pytest.approx(gigabytes * 1e9)
    assert (cluster.gpus, cluster.per_node, cluster.nodes) == (len(rows), len(rows), 1)


def test_few_lanes_are_slow(machine):
    machine("NVIDIA L40S", 4, SOCKETS, lanes="4, 16\n4, 8\n4, 16\n4, 16")
    assert detect().inside.bandwidth == pytest.approx(15.75e9)


def test_only_the_gpus_that_the_process_sees(machine, monkeypatch):
    machine("NVIDIA GeForce RTX 3090", 2, PAIRS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert detect().inside.name == "4 x nvlink3-bridge"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert detect().inside.name == "pcie4-through-host"


def test_without_the_drivers_text_the_catalogue_holds(machine):
    machine("AMD Instinct MI300X", 8, memory=191.9)
    cluster = detect(64)
    assert cluster.inside == find_link("infinity-fabric")
    assert cluster.gpu.memory_gib == pytest.approx(191.9, abs=0.1)
    assert (cluster.gpus, cluster.nodes) == (64, 8)


def test_memory_is_the_drivers(machine):
    machine("NVIDIA H100 80GB HBM3", 1, switched(1, "X"), memory=70)
    assert detect().gpu.memory_gib == pytest.approx(70)


def test_unknown_accelerator(machine):
    machine("NVIDIA T1000", 1)
    with pytest.raises(SpecError, match="T1000.*--cluster FILE.yaml"):
        detect()


def test_text_that_is_no_matrix():
    assert read_topology("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 8) == []
    assert read_topology("", 8) == []


def test_unlike_gpus_are_planned_for_the_slowest_and_the_least_memory():
    fast, slow = (
        detecting.Device("host", name, gib)
        for name, gib in (("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA A100-SXM4-40GB", 39.4))
    )
    cluster = detecting.reduce_to_slowest(make_cluster("h100-80gb", 3), [fast, slow, fast])
    assert (cluster.gpu.name, cluster.gpu.memory_gib, cluster.gpus) == ("a100-40gb", 39.4, 3)


def port(folder, name, rate, layer="InfiniBand", state="4: ACTIVE"):
    path = folder / name / "ports" / "1"
    path.mkdir(parents=True)
    for file, text in (("rate", rate), ("link_layer", layer), ("state", state)):
        (path / file).write_text(text + "\n")


def test_adapters(tmp_path):
    for i in range(8):
        port(tmp_path, f"mlx5_{i}", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_8", "100 Gb/sec (4X EDR)", "Ethernet")  # for storage
    port(tmp_path, "mlx5_9", "400 Gb/sec (4X NDR)", state="1: DOWN")
    link = detecting._find_network_adapters(8, str(tmp_path))
    assert link.name == "8 x InfiniBand 400 Gbit/s"
    assert link.bandwidth == pytest.approx(find_link("infiniband-ndr").bandwidth)
    assert detecting._find_network_adapters(8, str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
    ],
)
def test_names_that_drivers_give(name, own):
    assert find_gpu(name).name == own
