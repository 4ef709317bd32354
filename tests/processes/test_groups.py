"""Process groups: one for each set of ranks, in as few connections as messages need."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.axes.context.axis import build_ways
from hf_parallel.planner.dryrun.world import pretend_world
from hf_parallel.ranks import groups
from hf_parallel.ranks.groups import Groups
from hf_parallel.ranks.mesh import ParallelMesh, list_axis_ranks
from tests import models
from tests.distributed import run, run_alone

WORLD = 1024
#: Spec -> groups of more than one rank that this process is in, the default one among them.
HELD = {
    "tp=8,pp=8,dp_shard=16": 5,  # default, tp, pp, dp_shard, first and last stage
    "tp=8,pp=2,dp_shard=64": 4,  # with two stages these are the pipeline's ranks
    "dp_shard=1024": 1,
    "tp=8,pp=4,dp_shard=8,dp_replicate=4": 7,
}


def held(spec: str) -> tuple[int, int]:
    """Groups that the last of 1,024 ranks holds: of several ranks, and of one."""
    with pretend_world(WORLD - 1, WORLD):
        mesh = ParallelMesh.create(ParallelConfig.parse(spec), torch.device("cpu"))
        if mesh.size("pp") > 1:
            mesh.first_and_last_stage_group()
        assert mesh.data_group.size() == mesh.data_size
        sizes = [group.size() for group in dist.distributed_c10d._world.pg_map]
    return sum(size > 1 for size in sizes), sum(size == 1 for size in sizes)


@pytest.mark.parametrize("spec", HELD)
def test_no_set_of_ranks_has_two_groups(spec):
    several, single = run_alone(held, spec)
    assert several == HELD[spec]
    assert single <= 1


def calls_where_communicators_are_split(spec: str) -> tuple[list[int], int]:
    """Where `device_id` was given: parts of each split, and groups that are made one by one."""
    config, made, splits = ParallelConfig.parse(spec), [], []

    def split(split_ranks, **_):
        splits.append(len(split_ranks))
        return mock.Mock()

    with (
        pretend_world(WORLD - 1, WORLD),
        mock.patch.object(groups, "_is_split_from_default", return_value=True),
        mock.patch.object(dist, "split_group", split),
        mock.patch.object(dist, "new_group", lambda *args, **_: made.append(args)),
    ):
        for axis in config.resolve(WORLD).sizes:
            Groups(torch.device("cpu")).along(list_axis_ranks(config, axis))
    return splits, len(made)


def test_one_split_per_axis():
    """Else each rank takes part in a split of the whole world for each group that it is not in."""
    splits, made = run_alone(calls_where_communicators_are_split, "tp=8,pp=8,dp_shard=16")
    assert (len(splits), made) == (5, 0)
    assert 128 in splits


@pytest.mark.parametrize(("types", "told"), [(("cpu", "cuda"), "cuda:nccl"), (("cuda",), None)])
def test_a_split_keeps_options_of_nccl_from_gloo(types, told):
    """It would warn, and fall back to a time-out of its own."""
    seen = []

    def split(split_ranks, timeout, pg_options, backend=None):
        seen.append(backend)

    default = mock.Mock(_device_types=list(map(torch.device, types)))
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_world_size", return_value=4),
        mock.patch.object(dist.distributed_c10d, "_get_default_group", return_value=default),
        mock.patch.object(groups, "time_out", return_value=None),
        mock.patch.object(dist, "split_group", split),
    ):
        Groups(torch.device("cuda")).among([[0, 1], [2, 3]])
    assert seen == [told]


def urgent(spec: str) -> list[object]:
    """The options of each group that is made, where groups can have a priority."""
    seen = []

    def made(ranks, **settings):
        seen.append(settings.get("pg_options"))
        return new_group(ranks, timeout=settings["timeout"])

    new_group = dist.new_group
    with (
        pretend_world(0, 4),
        mock.patch.object(dist, "new_group", made),
        mock.patch.object(groups, "make_urgent_options", return_value="high"),
    ):
        ParallelMesh.create(ParallelConfig.parse(spec), torch.device("cpu"))
    return seen


def test_tensor_parallelism_has_priority():
    """Its group alone, and one of its own where its ranks are all of them."""
    assert run_alone(urgent, "tp=2,pp=2").count("high") == 2
    assert run_alone(urgent, "tp=4") == [None] * 4 + ["high"]


def connected(variant: str) -> list[int]:
    """Sizes of groups that exchange a message before attention does, where communicators are made at the first one."""
    seen, config = [], ParallelConfig.parse("cp=4").resolve(4)
    all_reduce = dist.all_reduce
    with (
        pretend_world(0, 4),
        mock.patch.object(groups, "_does_connect_late", return_value=True),
        mock.patch.object(dist, "all_reduce", lambda tensor, group: seen.append(group.size()) or all_reduce(tensor)),
    ):
        build_ways(ParallelMesh.create(config, torch.device("cpu")), config, [variant])
    return seen


@pytest.mark.parametrize(("variant", "sizes"), [("ring", [4]), ("hybrid:2", [2]), ("ulysses", [])])
def test_rings_are_connected_before_some_ranks_send(variant, sizes):
    """A rank that has nothing to send would never come, and NCCL waits for it: windows, packs of short documents."""
    assert run_alone(connected, variant) == sizes


def sockets() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link).startswith("socket") for link in links)


def opened() -> int:
    before = sockets()
    group = groups.make_host_group()
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == dist.get_world_size()
    return sockets() - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists")
def test_ranks_connect_when_they_have_something_to_say():
    """A ring has two neighbours; all ranks would be seven, and in a world of 1,024 all but one."""
    assert max(run(opened, 8)) <= 4


def told() -> tuple[bool, int, int, torch.Tensor]:
    """Is there a group for pickles, how many went through the other and in all, and the loss."""
    through = []
    broadcast = dist.broadcast_object_list

    def counted(objects, *args, **kwargs):
        through.append(kwargs["group"])
        return broadcast(objects, *args, **kwargs)

    with mock.patch.object(groups, "can_send_host_memory", return_value=False):
        model = parallelize(models.build("llama").eval(), "pp=2")
    engine = model._hf_parallel.pipeline
    ids = torch.arange(33).view(3, 11)
    with torch.no_grad(), mock.patch.object(dist, "broadcast_object_list", counted):
        loss = model(input_ids=ids, labels=ids).loss
    return engine.control is not engine.group, sum(group is engine.group for group in through), len(through), loss


def test_pickles_do_not_go_through_the_gpu():
    """Of an evaluation batch: its one call, the end, and what it returned."""
    expected = run_alone(lambda: _loss(models.build("llama").eval()))
    for apart, through_group, through_all, loss in run(told, 2):
        assert (apart, through_group, through_all) == (True, 0, 3)
        torch.testing.assert_close(loss, expected)


def _loss(model):
    ids = torch.arange(33).view(3, 11)
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss
