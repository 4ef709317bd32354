"""What every rank of a pipeline runs, in which order: read from torch's own schedules, without any process.

    order("1f1b", stages=2, virtual=1, micro_batches=2)[1]     # forward 0, backward 0, forward 1, backward 1

GPipe (Huang 2019); 1F1B (PipeDream-Flush, Narayanan 2021); interleaved, depth first (Megatron, Narayanan 2021) or
breadth first (Lamy-Poirier 2022); the backward pass split into the gradients of input and weights (Zero Bubble, Qi
2023); a forward and a backward run as one (DualPipe, DeepSeek-AI 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_parallel.ask.keys.pipeline import LOOPED_SCHEDULES, SINGLE_SCHEDULES, V_SCHEDULES
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action

FORWARD, BACKWARD, OVERLAP = "forward", "backward", "overlap"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT, "OVERLAP_F_B": OVERLAP}
SIMPLEST_FIRST = ("gpipe", "1f1b", *LOOPED_SCHEDULES, *V_SCHEDULES)


class Action(NamedTuple):
    """One piece of work of one rank. An overlap has two parts, a forward and a full backward, and no stage itself."""

    kind: str
    stage: int
    micro_batch: int
    parts: tuple[Action, ...] = ()


Order = dict[int, list[Action]]


def order(name: str, stages: int, virtual: int, micro_batches: int) -> Order:
    """The compute actions of every rank, in the order in which torch's own schedule runs them.

    Args:
        stages: number of ranks of the pipeline.
        virtual: stages on each rank.

    Raises:
        SpecError: the schedule cannot run with these numbers.
        RuntimeError: this version of torch keeps its schedules in another form than 2.11 to 2.13.
    """
    _check_numbers(name, stages, virtual, micro_batches)
    read = _run_single if name in SINGLE_SCHEDULES else _read_looped
    try:
        actions = read(name, stages, virtual, micro_batches)
    except ValueError as error:  # torch's way to say that the numbers do not fit
        refuse(f"pipeline_schedule={name}", f"{' '.join(str(error).split())}", cause=error)
    except (AttributeError, TypeError, KeyError, IndexError, AssertionError) as error:
        raise RuntimeError(f"hf_parallel: cannot read the {name} schedule of torch {torch.__version__}") from error
    _check_complete(name, actions, stages * virtual, micro_batches)
    return actions


def virtual_stages(name: str, asked: int = 2) -> int:
    """Stages per rank: one or two where the schedule fixes them, else `asked`."""
    return asked if name in LOOPED_SCHEDULES else 2 if name in V_SCHEDULES else 1


def _check_numbers(name: str, stages: int, virtual: int, micro_batches: int) -> None:
    if name not in SIMPLEST_FIRST:
        refuse(f"pipeline_schedule={name}", f"not one of {', '.join(SIMPLEST_FIRST)}")
    works = virtual_stages(name, max(virtual, 1))
    if virtual != works:
        refuse(f"pipeline_schedule={name}", f"cannot run {virtual} stages per rank", works)
    if stages < 1 or micro_batches < 1:
        refuse(f"pipeline_microbatches={micro_batches}", f"pp_size={stages} needs at least {max(1, stages)}")


class _StandIn:
    """What torch's schedules read of a stage. It computes nothing and notes what they ask it to run."""

    is_first = is_last = False  # so no loss is asked for
    has_backward = True
    submod = None

    def __init__(self, rank: int, index: int, ranks: int, stages: int) -> None:
        self.group_rank, self.stage_index, self.group_size, self.num_stages = rank, index, ranks, stages
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(FORWARD, self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(BACKWARD, self.stage_index, micro_batch))

    def perform_reduce_grad(self, *args: object, **kwargs: object) -> None:
        pass

    def _no_messages(self, micro_batch: int) -> list:
        return []

    scale_grads = perform_reduce_grad  # its name up to 2.9
    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages


def _schedule(name: str, stage: _StandIn | list[_StandIn], micro_batches: int) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class  # slow to import: for pipelines only

    make = get_schedule_class(name.replace("_", ""))
    return make(stage, micro_batches, loss_fn=lambda output, target: output)


def _run_single(name: str, stages: int, virtual: int, micro_batches: int) -> Order:
    """Run the schedule: what 1F1B publishes as the order of its last rank leaves out the first forward."""
    actions = {}
    for rank in range(stages):
        stage = _StandIn(rank, rank, stages, stages)
        schedule = _schedule(name, stage, micro_batches)
        schedule._initialize_stage = lambda *args, **kwargs: None  # would look for a process group
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        actions[rank] = stage.actions
    return actions


def _read_looped(name: str, stages: int, virtual: int, micro_batches: int) -> Order:
    """These schedules run what they publish: the order of all ranks, with None where one is expected to wait."""
    local = [_StandIn(0, index, stages, stages * virtual) for index in range(virtual)]
    published = _schedule(name, local, micro_batches).pipeline_order
    return {rank: [_translate(action) for action in published[rank] if action] for rank in range(stages)}


def _translate(action: _Action) -> Action:
    parts = tuple(_translate(part) for part in action.sub_actions or ())
    micro_batch = -1 if action.microbatch_index is None else action.microbatch_index
    return Action(_KINDS[action.computation_type.value], action.stage_index, micro_batch, parts)


def _check_complete(name: str, actions: Order, stages: int, micro_batches: int) -> None:
    """Every stage runs every micro-batch forward once and backward once, on one rank."""
    seen = Counter((part.kind, part.stage, part.micro_batch) for rank in actions for part in flat(actions[rank]))
    for stage in range(stages):
        for i in range(micro_batches):
            forward, whole, *halves = (seen.pop((kind, stage, i), 0) for kind in COMPUTE)
            if forward != 1 or (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
                raise RuntimeError(f"hf_parallel: torch {torch.__version__} runs {name} not once over stage {stage}")
    if seen:
        raise RuntimeError(f"hf_parallel: torch {torch.__version__} adds {next(iter(seen))} to {name}")


def flat(actions: Iterable[Action]) -> list[Action]:
    """The same actions with overlaps taken apart."""
    return [part for action in actions for part in action.parts or (action,)]


def peak_live(order: Order) -> list[int]:
    """Per rank the largest number of forwards whose activations are held: until their backward has run, both parts."""
    peaks = []
    for rank in sorted(order):
        live = [0]
        for action in flat(order[rank]):
            live.append(live[-1] + (action.kind == FORWARD) - (action.kind in (BACKWARD, BACKWARD_WEIGHT)))
        peaks.append(max(live))
    return peaks
