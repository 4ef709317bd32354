"""Parameters that rest in files: the numbers of one process, read ahead of their use, and no memory of a process."""

import ctypes
import gc
import os

import pytest
import torch
import torch.distributed as dist

from hf_parallel.ask.config import ParallelConfig, SpecError
from tests import models
from tests.distributed import run, run_alone
from tests.parity.test_offload import OPTIMIZERS, alone, offloaded
from tests.rows import Rows
from tests.training import Script

#: Nothing divides: 515 rows of the vocabulary, 3 layers.
ODD = {"num_hidden_layers": 3, "vocab_size": 515}


def test_same_weights_as_one_process_under_each_optimizer(tmp_path):
    expected = run_alone(alone, list(OPTIMIZERS))
    for rank in run(offloaded, 2, f"offload=nvme_all:{tmp_path}", list(OPTIMIZERS), 2, 2**15):
        for name, ours, theirs in zip(OPTIMIZERS, rank, expected, strict=True):
            gap = max((ours[key] - theirs[key]).abs().max().item() for key in theirs)
            # absolute; Adam's first step is lr times the sign of a gradient, whatever is left of it at 1e-8
            assert gap <= (1e-6 if name in ("sgd", "momentum") else 2e-5), (name, gap)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2", "dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize("lora", [False, True])
def test_trainer_with_clipping_and_accumulation(runs, layout, lora, tmp_path_factory):
    adapters = (("r", 4), ("target_modules", "all-linear")) if lora else ()
    script = Script(lora=adapters, arguments=(("max_grad_norm", 0.5),)).with_accumulation(4)
    runs.check(script, f"{layout},offload=nvme_all:{tmp_path_factory.getbasetemp()}/parameters")


def watched(path: str) -> list[tuple[str, int]]:
    """Of a step's forward and backward: which part of the file is read ahead, gathered, let go of."""
    import hf_parallel
    from hf_parallel.axes.data import files

    model = hf_parallel.parallelize(models.build("llama", **ODD), f"dp_shard=2,offload=nvme_all:{path}")
    batch = {key: value[None] for key, value in Rows(1, seed=1, even=True, length=16)[0].items()}
    model(**batch)  # puts them into the file
    events: list[tuple[str, int]] = []
    file = files.StateFile

    def noting(name):
        original = getattr(file, name)
        return lambda self, part: (events.append((name, part.start)), original(self, part))[1]

    file.fetch, file.release = noting("fetch"), noting("release")
    model(**batch).loss.backward()
    with open("/proc/self/maps") as maps:
        mapped = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if f" {path}" in line]
    for parameter in model.parameters():
        address = parameter._local_tensor.data_ptr()
        assert not parameter._local_tensor.numel() or any(low <= address < high for low, high in mapped)
    return events


def test_read_ahead_of_use_layer_by_layer(tmp_path):
    for events in run(watched, 2, str(tmp_path)):
        released = [part for kind, part in events if kind == "release"]
        layers = [part for part in released if released.count(part) == 2]  # gathered in forward and backward
        forward, backward = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        assert len(forward) >= ODD["num_hidden_layers"]
        assert backward == forward[::-1]
        for former, latter in zip(released, released[1:], strict=False):
            if former != latter and former in layers and latter in layers:
                assert events.index(("fetch", latter)) < events.index(("release", latter))
        assert [kind for kind, _ in events].count("fetch") >= 2 * len(forward) - 2


def anonymous() -> int:
    """Bytes of memory that has no file behind it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def grown(way: str) -> tuple[int, int]:
    """By how many bytes a process has grown after two steps, and the bytes of its parameters."""
    import hf_parallel
    from hf_parallel.axes.data import host_step

    host_step.CHUNK = 2**20  # bytes; the model is small
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: what is freed is given back
    small = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}
    rows = Rows(1, seed=dist.get_rank(), even=True, length=16)
    batch = {key: value[None] for key, value in rows[0].items()}
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous()
    model = hf_parallel.parallelize(models.build("llama", num_hidden_layers=12, **small), f"dp_shard=2,offload={way}")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous() - before, sum(parameter._local_tensor.nbytes for parameter in model.parameters())


def test_memory_of_the_process(tmp_path):
    (on_host, size), (in_files, _) = (run(grown, 2, way)[0] for way in ("cpu", f"nvme_all:{tmp_path}"))
    assert size > 16 * 2**20
    assert on_host - in_files > 0.9 * 3 * size, (on_host, in_files, size)  # parameters, and Adam's two moments


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_shard=2,zero_stage=0", "dp_replicate=2,dp_shard=1"])
def test_refused_where_nothing_is_gathered(layout, tmp_path):
    from hf_parallel.plans.resolve import read_model, resolve

    config = ParallelConfig.parse(f"{layout},offload=nvme_all:{tmp_path}").resolve(1 if layout == "dp_shard=1" else 2)
    with pytest.raises(SpecError) as caught:
        resolve(config, read_model(models.build("llama"), config))
    for word in (f"offload=nvme_all:{tmp_path}", f"offload=nvme:{tmp_path} works"):
        assert word in str(caught.value)


def no_room(path: str) -> str:
    import errno

    import hf_parallel

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = full
    try:
        hf_parallel.parallelize(models.build("llama", **ODD), f"dp_shard=2,offload=nvme_all:{path}")
    except SpecError as error:
        return str(error)
    return "not refused"


def test_a_disk_without_room_is_refused_at_start(tmp_path):
    for message in run(no_room, 2, str(tmp_path)):
        for word in (f"offload=nvme_all:{tmp_path}", "parameters of this rank need", "GiB are free"):
            assert word in message, message
