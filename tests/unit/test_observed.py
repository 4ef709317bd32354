"""Listeners to this process's collectives: who hears of what, and what is left in torch when they stop."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup, Work

from hf_parallel.ask.session import of_process
from hf_parallel.axes import activation_offload
from hf_parallel.monitor import collective_record
from hf_parallel.monitor.collective_record import CollectiveRecord
from hf_parallel.monitor.hang_report import format_hang
from hf_parallel.monitor.waits import HostClock, Waits
from hf_parallel.monitor.watchdog import Settings, Watchdog
from hf_parallel.ranks import observed
from hf_parallel.ranks.observed import Call, listen, unlisten

CPU = torch.device("cpu")


class Group:
    """A process group of two ranks, by what a record asks of it."""

    group_name = "7"

    def __init__(self, device, backend="gloo"):
        self._device_types = [torch.device(device)]
        self._get_backend = lambda device: mock.Mock(**{"name.return_value": backend})

    def _get_sequence_number_for_group(self):
        return 4711


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 3])
    return CollectiveRecord({"7": "dp_shard"}, nn.Linear(3, 3))


@pytest.mark.parametrize("first", ["record", "waits"])
def test_in_whatever_order_they_stop_torch_is_as_it_was(first, recorded):
    """The watchdog's and the monitor's: the other one still hears, and nothing is left."""
    before = dict(vars(ProcessGroup)), dict(vars(Work))
    waits = Waits({}, HostClock(), lambda *_: None)
    listen(recorded)
    waits.start(CPU)
    wrapped = ProcessGroup.allreduce
    assert not hasattr(wrapped.__wrapped__, "__wrapped__")  # once, for both
    stop = {"record": lambda: unlisten(recorded), "waits": waits.stop}
    stop.pop(first)()
    assert ProcessGroup.allreduce is wrapped
    assert of_process(observed.Listening).listeners == ((waits,) if first == "record" else (recorded,))
    stop.popitem()[1]()
    assert (dict(vars(ProcessGroup)), dict(vars(Work))) == before


def test_all_that_torch_calls_is_known():
    """Under one name or the other, by the version of torch."""
    known = {name for name in observed.KINDS if hasattr(ProcessGroup, name)}
    assert {"allreduce", "send", "recv", "recv_anysource", "_end_coalescing", "barrier"} <= known


def test_what_a_call_is_with():
    tensor = torch.ones(5, 3)
    assert Call("send", Group("cpu"), ([tensor], 1, 0)).peer == 1
    anybody = Call("recv_anysource", Group("cpu"), ([tensor], 9))  # 9 is a tag
    assert (anybody.kind, anybody.peer, anybody.tensor is tensor) == ("receive", None, True)
    assert Call("_allgather_base", Group("cpu"), (torch.ones(10, 3), tensor)).tensor is tensor
    for name, args in (("_end_coalescing", (CPU,)), ("barrier", ())):
        assert Call(name, Group("cpu"), args).tensor is None


def test_waits_of_an_open_window_alone():
    told, work = [], object()
    waits = Waits({"7": "tp"}, HostClock(), lambda axis, begin, end: told.append(axis))
    waits.clock.begin()
    for waits.open in (False, True):
        call = Call("allreduce", Group("cpu"), ([torch.ones(2)],))
        waits.begin(call)
        waits.end(call, work)
        waits.waiting(work)
        waits.waited(work)
        waits.waiting(work)  # it was waited for
        waits.waited(work)
    assert told == ["tp", "tp"]


def test_the_end_of_several_is_no_collective(recorded):
    """Numbers of a group are those of the flight recorder, which does not count it."""
    for name, args in (("allreduce", ([torch.ones(2)],)), ("_end_coalescing", (torch.device("cuda"),))):
        call = Call(name, Group("cuda"), args)
        recorded.begin(call)
        recorded.end(call, object())
    assert [entry.kind for entry in recorded.entries["7"]] == ["all_reduce"]
    assert recorded._starting == {}


@pytest.mark.parametrize(("device", "waits"), [("cuda", True), ("cpu", False)])
def test_a_collective_of_the_device_is_a_wait_wherever_the_host_stands(recorded, monkeypatch, tmp_path, device, waits):
    """On NCCL the host has gone on, to where it needs the result: a copy, a print."""
    monkeypatch.setattr(collective_record, "list_unfinished_on_device", lambda: {"7": {4711}})
    call = Call("allreduce", Group(device), ([torch.ones(5, 3)],))
    recorded.begin(call)
    if device == "cuda":  # on gloo it has not returned: the thread is seen to wait
        recorded.end(call, object())
    facts = recorded.facts()
    assert [found["on_device"] for found in facts["pending"]] == [waits]
    own = Watchdog(dist.HashStore(), 0, 1, Settings(600, ends=False, folder=str(tmp_path)), recorded.facts)
    own.close()
    assert own._gather_facts()["waits"] == waits
    json.dumps(facts)
    if waits:
        other = {"waits": False, "pending": [], "groups": {}, "place": "in a callback (`cb.py:1`, on_log)"}
        told = format_hang({2: {"waits": True, "place": "", **facts}, 3: other})
        assert told.startswith("rank 2 waits in all_reduce number 4,711 (dp_shard, test_observed.py:")
        assert "for rank 3; rank 3 is in a callback" in told


@pytest.mark.parametrize(("backend", "kept"), [("nccl", False), ("nccl2", False), ("gloo", True)])
def test_work_of_nccl_is_not_kept_in_a_group_that_has_gloo_too(recorded, backend, kept):
    """It would keep tensors of the GPU until a later collective looks."""
    call = Call("allreduce", Group("cpu", backend), ([torch.ones(2, device="meta")],))
    recorded.begin(call)
    recorded.end(call, mock.Mock(is_completed=lambda: False))
    (entry,) = recorded.entries["7"]
    assert (entry.work is not None) == entry.on_host == kept


def test_a_message_from_anybody(recorded, monkeypatch):
    call = Call("recv_anysource", Group("cpu"), ([torch.ones(2)], 0))
    recorded.begin(call)
    assert "waits in receive from any rank (dp_shard" in format_hang(
        {2: {"waits": True, "place": "", **recorded.facts()}}
    )


def test_results_of_attention_on_the_host(monkeypatch):
    """A checkpoint is given its numbers back as a tensor of its own, unless they changed while they were copied."""
    monkeypatch.setattr(activation_offload, "SMALL", 1)
    kept = activation_offload.Kept(activation_offload.Host(torch.device("cpu")), None, [])
    tensor = torch.randn(2, 5, 3, 4).transpose(1, 2)
    noted = kept.note(tensor)
    again = noted.again()
    assert torch.equal(again, tensor)
    assert (again.stride(), again._is_view()) == (tensor.stride(), False)
    noted.packed[0].leaving = tensor.detach()  # as on a GPU, whose copy is on its way
    assert noted.unchanged
    tensor.add_(1)
    assert not noted.unchanged
    noted.packed[0].let_go()
    assert not noted.unchanged
