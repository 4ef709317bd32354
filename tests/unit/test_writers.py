"""Who writes what: every part once, by ranks that may write, evenly, in rounds in which nobody waits in a circle."""

import os

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.checkpoint import writers
from hf_parallel.checkpoint.hub_format import Entry, Group
from hf_parallel.checkpoint.writers import compute_part_of
from hf_parallel.model.anatomy import make_packed_order
from hf_parallel.ranks.mesh import compute_coordinates
from tests.training import axes

SPECS = [
    "dp_shard=4",
    "tp=4",
    "tp=2,dp_shard=2",
    "dp_replicate=2,dp_shard=2,tp=2",
    "pp=2,dp_shard=2,tp=2",
    "pp=2,tp=2",
]


def entries(config: ParallelConfig) -> list[Entry]:
    """Layers of a model: rows, columns, packed rows, uneven rows, norms."""
    cut, stages = [axis for axis in ("tp", "dp_shard") if getattr(config, f"{axis}_size") > 1], config.pp_size
    rows, columns = tuple((axis, 0) for axis in cut), tuple((axis, int(axis == "tp")) for axis in cut)
    order, found = make_packed_order([32, 16, 16], config.tp_size, 0), []
    for layer in range(8):
        kinds = {"up": (64, 32), "down": (32, 64), "qkv": (64, 32), "odd": (9, 16), "norm": (32,)}
        for name, shape in kinds.items():
            cuts = columns if name == "down" else () if name == "norm" else rows
            packed = order if name == "qkv" else None
            found.append(Entry(f"{layer}.{name}", shape, torch.float32, layer % stages, cuts, packed))
    return found


def assigned(spec: str, may_write: list[int] | None = None):
    config = ParallelConfig.parse(spec).resolve(axes(spec)["world"])
    allowed = range(config.world_size) if may_write is None else may_write
    return config, writers.assign_items([Group((e,), (e,)) for e in entries(config)], allowed, config)


@pytest.mark.parametrize("long", [1, 1 << 11, 1 << 30])
@pytest.mark.parametrize("spec", SPECS)
def test_every_value_is_taken_once_from_its_stage(monkeypatch, spec, long):
    monkeypatch.setattr(writers, "LONG", long)
    config, items = assigned(spec)
    assert len(items) == len(entries(config))
    for item in items:
        (entry,), (ranks,) = item.group.own, item.holders
        counts = torch.zeros(entry.shape)
        for number, rank in enumerate(ranks):
            counts[torch.meshgrid(*compute_part_of(entry, number, config), indexing="ij")] += 1
            place = compute_coordinates(config, rank)
            assert place["pp"] == entry.stage
            expected = {axis: place[axis] for axis, _ in entry.cuts}
            assert number == sum_of_places(expected, entry, config)
        assert bool((counts == 1).all())
        assert item.writer is None or item.writer in ranks  # nothing travels in vain


def sum_of_places(place: dict[str, int], entry: Entry, config: ParallelConfig) -> int:
    number = 0
    for axis, _ in entry.cuts:
        number = number * getattr(config, f"{axis}_size") + place[axis]
    return number


@pytest.mark.parametrize("long", [1, 1 << 30])
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_write_about_as_much(monkeypatch, spec, long):
    monkeypatch.setattr(writers, "LONG", long)
    config, items = assigned(spec)
    load = dict.fromkeys(range(config.world_size), 0)
    for item in items:
        for number, rank in enumerate(item.holders[0]):
            part = compute_part_of(item.group.own[0], number, config)
            if item.writer is None:
                load[rank] += 4 * torch.Size(map(len, part)).numel()
        if item.writer is not None:
            load[item.writer] += item.group.nbytes
    assert max(load.values()) - min(load.values()) <= max(item.group.nbytes for item in items)


@pytest.mark.parametrize("spec", SPECS)
def test_only_those_write_that_may(monkeypatch, spec):
    monkeypatch.setattr(writers, "LONG", 1)
    for may_write in ([0], [0, 1], [0, 2, 3]):
        items = assigned(spec, may_write)[1]
        used = {rank for item in items for rank in (item.holders[0] if item.writer is None else (item.writer,))}
        assert used == set(may_write)


def test_rounds_have_one_item_of_each_writer_at_most(monkeypatch):
    monkeypatch.setattr(writers, "LONG", 1 << 30)
    _, items = assigned("tp=2,dp_shard=2")
    found = list(writers.order_in_rounds(items))
    for together in found:
        assert len({item.writer for item in together}) == len(together)
    assert sum(map(len, found)) == sum(item.writer is not None for item in items)
    assert [len(together) for together in found[:-1]] == [4] * (len(found) - 1)


def test_who_sees_the_folder(tmp_path, monkeypatch):
    """The marker must be there; another machine writes only to file systems on which machines may share a file."""
    name, here = writers._put_marker(str(tmp_path)), writers.read_machine_id()
    assert writers._does_see_marker(str(tmp_path), name, here)
    assert not writers._does_see_marker(str(tmp_path / "elsewhere"), name, here)
    assert not writers._does_see_marker(str(tmp_path), None, here)
    assert not writers._does_see_marker(str(tmp_path), name, "another")
    monkeypatch.setattr(writers, "_read_file_system", lambda directory: "lustre")
    assert writers._does_see_marker(str(tmp_path), name, "another")
    assert writers._put_marker(str(tmp_path / "missing")) is None
    assert os.listdir(tmp_path) == [name]


def test_the_file_system_is_that_of_the_longest_mount(tmp_path):
    assert writers._read_file_system("/proc/self") == "proc"
    assert writers._read_file_system(str(tmp_path)) not in ("proc", "")
