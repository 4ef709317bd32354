"""A process that plays any rank of the whole world: the real code, on tensors without memory.

    ran = dry_run(config, "tp=8,pp=4,dp_shard=32", rank=1023, rows=8, seq=4096)
    ran.peak                                  # {"parameters": bytes, "gradients": …, "activations": …}
    ran.communication["tp"]["all_gather"]     # Traffic(count=…, payload=…, sent=…)

`parallelize_model` itself runs, then two training steps, on fake tensors that know their shape only, with a process
group that communicates nothing. Calling Python once per operation is what takes time, so a model of equal layers is
run with three and with four of them on each of this rank's stages, and extrapolated linearly: every part of a step
(see `recorder.py`) grows by the same amount with each further layer (with N further ones under `every:N`).
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from hf_parallel.apply.parallelize import ParallelState, parallelize_model, state_of
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.data import parameters_rest
from hf_parallel.ask.keys.layers import read_recompute_interval
from hf_parallel.ask.keys.pipeline import LOOPED_SCHEDULES, V_SCHEDULES
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Packing
from hf_parallel.axes.pipeline.axis import PIPELINE
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.axes.tensor.axis import SplitFacts
from hf_parallel.model.anatomy import build_on_meta, find_backbone_plan, get_backbone_of, list_transformer_blocks
from hf_parallel.planner.dryrun.recorder import Communication, Observed, Recorder, Traffic, observe, record_parts
from hf_parallel.planner.dryrun.world import Shapes, fake_tensors_pass_as_real, materialise_weights, pretend_world
from hf_parallel.plans.resolve import read_model, resolve
from hf_parallel.ranks.mesh import ParallelMesh, compute_coordinates, list_axis_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from hf_parallel.axes.pipeline.chimera import StageDescription

#: Precision -> dtype of the weights, and what autocast lowers products to, if Trainer turns it on.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "mixed": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
_FEWEST = 3  # layers on a stage: a first one, a last one and one between
_FORWARDS_FIRST = ("gpipe", "looped_bfs")
#: What a fake tensor answers when the code asks for its value: torch's schedules ask whether all stages know their
#: shapes (1: yes), ours which micro-batch to run (all have the same shape).
_ANY_VALUE = 1
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass
class DryRun:
    """The memory and transfers of one rank in a training step.

    peak: bytes by kind (parameters, gradients, optimizer, gathered, activations) at the fullest moment.
    kept: the same just before `zero_grad`: what stays from step to step, and the gradients.
    communication: by axis and kind of collective.
    """

    rank: int
    place: dict[str, int]
    peak: Counter[str]
    kept: Counter[str]
    communication: Communication
    layers: tuple[int, ...]  # of each stage that this rank runs
    layers_run: tuple[int, ...]
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return self.peak.total()

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        values = dataclasses.asdict(self)
        return {**values, "peak": dict(self.peak), "kept": dict(self.kept), "peak_bytes": self.peak_bytes}


def dry_run(
    model: PretrainedConfig | nn.Module,
    config: ParallelConfig | str,
    *,
    world_size: int | None = None,
    rank: int = 0,
    rows: int = 1,
    seq: int = 2048,
    accumulation: int = 1,
    optimizer: str = "adamw",
    precision: str = "bf16",
    whole: bool = False,
    layers: int | None = None,
    adapt: Callable[[nn.Module], None] | None = None,
    pack: Packing | None = None,
    device: str = "cpu",
) -> DryRun:
    """Run `parallelize_model` and two training steps as `rank` of a world that is not there.

    Args:
        model: a transformers config, or a model on the meta device, which is not changed.
        world_size: number of processes; default: what the sizes of `config` multiply to.
        rows: of one call of the model on one data rank; a pipeline cuts them into micro-batches.
        accumulation: calls per optimizer step.
        precision: "bf16" and "fp32": of the weights and all else; "mixed" and "fp16": fp32 weights under autocast to
            bf16 or fp16, as Trainer's bf16=True and fp16=True have it.
        whole: run all layers and micro-batches, even if they are equal.
        layers: as if the model had only so many.
        adapt: puts adapters into the parallel model, which is on the meta device: `lora` of hooks/planned_adapters.py.
        pack: what `parallelize_model` takes: `four_bit` of the same file.
        device: whose branches are taken: "cuda" needs a GPU, see `find_device`.

    Raises:
        SpecError: the layout cannot hold, this process has a process group, or the model needs values.
    """
    began = time.monotonic()
    if precision not in PRECISIONS:
        refuse(f"precision={precision}", f"the dry run knows {', '.join(PRECISIONS)}", "bf16")
    config = ParallelConfig.parse(config)
    config = config.resolve(world_size if world_size is not None else abs(config.world_size))
    if find_device(device)[1]:
        refuse(f"device={device}", find_device(device)[1], "device=cpu")
    offload = config.offload if config.offload_ranks is None or rank in config.offload_ranks else "none"
    away = frozenset({"optimizer"} if offload != "none" else ())  # kinds of memory that are the host's, or a file's
    away |= {"parameters", "gradients"} if parameters_rest(offload) else set()
    config, notes = dataclasses.replace(config, offload="none"), list[str]()
    model = on_meta(model).to(PRECISIONS[precision][0])
    if config.tp_overlap and config.compile != "none":
        _check_fused_products(model, config)
        notes.append("tp_overlap=true: products and their collectives run one after another here, of the same bytes")
        config = dataclasses.replace(config, tp_overlap=False)
    if config.pp_size > 1 and getattr(model.config, "output_router_logits", False):
        why = "balances experts in steps whose stages wait for what the last one tells, which no dry run has"
        refuse("output_router_logits=True under pp", why, "output_router_logits=False")
    if config.fills_bubbles:
        why = "runs by the measured times of a step, which no dry run has"
        refuse(f"pipeline_fill={config.pipeline_fill}", why, "pipeline_fill=none")
    stack = _find_only_stack(model)
    if layers is not None and stack is not None:
        get_backbone_of(model).set_submodule(stack.name, nn.ModuleList(stack.layers[:layers]))
        stack = _find_only_stack(model)
    config, counts = settle_layout(model, config, rank)
    blocks = [] if stack is None else stack.layers
    shapes = [[(name, tuple(p.shape)) for name, p in block.named_parameters()] for block in blocks]
    fewest = counts
    if not whole and stack is not None and all(shape == shapes[0] for shape in shapes):  # they stand for each other
        every = read_recompute_interval(config.recompute_way) or 1  # so many layers further on one is like this one
        fewest = tuple(count if count < _FEWEST else _FEWEST + (count - _FEWEST) % every for count in counts)
    of_step = (rank, rows, seq, accumulation, optimizer, precision, adapt, pack, away, torch.device(device))
    run = _Run(model, stack, config, *of_step)
    total = run.continued(fewest, counts) if whole else _extrapolate_micro_batches(run, fewest, counts)
    seen = (total.peak, total.kept, total.communication)
    place, seconds = compute_coordinates(config, rank), time.monotonic() - began
    return DryRun(rank, place, *seen, counts, fewest, seconds, notes)


def count_alone(
    model: PretrainedConfig | nn.Module,
    *,
    rows: int,
    seq: int,
    precision: str,
    layers: int,
    adapt: Callable[[nn.Module], None] | None = None,
) -> int:
    """Return the bytes of activations of one process at the fullest moment of a model call and its backward.

    Logits are whole. A process group of this process is left alone. Arguments are those of `dry_run`.
    """
    dtype, lowered = PRECISIONS[precision]
    model = on_meta(model).to(dtype)
    stack = _find_only_stack(model)
    if stack is not None:
        get_backbone_of(model).set_submodule(stack.name, nn.ModuleList(stack.layers[:layers]))
    model.train()
    model.config.use_cache = False
    if adapt is not None:
        adapt(model)
    with fake_tensors_pass_as_real(), Shapes(allow_non_fake_inputs=True):
        materialise_weights(model)
        ids = torch.zeros((rows, seq), dtype=torch.long)
        parts = tuple(list_transformer_blocks(model))
        with Recorder({}, scalars=_ANY_VALUE) as recorder, record_parts(recorder, (parts,)):
            kinds = {recorder.note(tensor): "parameters" for tensor in (*model.parameters(), *model.buffers())}
            recorder.remember()
            with torch.autocast(next(model.parameters()).device.type, lowered, enabled=lowered is not None):
                loss = model(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            kinds |= {recorder.note(p.grad): "gradients" for p in model.parameters() if p.grad is not None}
            recorder.remember()
            return max(recorder.peaks(kinds), key=lambda peak: peak.total())["activations"]


def _check_fused_products(model: PreTrainedModel, config: ParallelConfig) -> None:
    """Refuse what fused products run against, but for GPUs that are not here: a plan may be for others.

    Raises:
        SpecError: the first problem.
    """
    anatomy = read_model(model, config)
    facts = anatomy.facts["tp"]
    assert isinstance(facts, SplitFacts)
    without = dataclasses.replace(facts, memory_obstacle=None)
    resolve(config, dataclasses.replace(anatomy, facts={**anatomy.facts, "tp": without}))


def find_device(asked: str) -> tuple[str, str]:
    """Return the device whose branches a dry run can take, and the reason if it is not the one asked for.

    Fake tensors of a GPU have no memory, but streams, which FSDP2 and offloading make, and autograd's threads need
    torch's CUDA and one device.
    """
    if asked == "cpu" or torch.cuda.is_available():
        return asked, ""
    return "cpu", "this torch is built without CUDA" if torch.version.cuda is None else "there is no GPU here"


def on_meta(model: PretrainedConfig | nn.Module) -> PreTrainedModel:
    """Return the model of a config on the meta device, or a copy of a model that is there already."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    return build_on_meta(model)


def settle_layout(model: PreTrainedModel, config: ParallelConfig, rank: int) -> tuple[ParallelConfig, tuple[int, ...]]:
    """Return the config with all decided that depends on the whole model, and the layers of the rank's stages."""
    if config.pp_size == 1:
        stack = _find_only_stack(model)
        return config, (len(stack.layers) if stack else 0,)
    part = resolve(config, read_model(model, config)).part(PIPELINE)
    assert part is not None
    split = part.layers_per_stage
    counts = tuple(split[stage] for stage in _list_stages_run(part.config, rank))
    return dataclasses.replace(part.config, pipeline_split=split), counts


def _list_stages_run(config: ParallelConfig, rank: int) -> list[int]:
    """Return indices of the stages that a rank runs: its own, and the one that it mirrors."""
    place = compute_coordinates(config, rank)["pp"]
    return config.stages_of_rank(place) + [config.pp_size - 1 - place] * config.mirrors_stages


class LayerList(NamedTuple):
    """The layers of a model, and the name of their list in its backbone."""

    layers: list[nn.Module]
    name: str


def _find_only_stack(model: PreTrainedModel) -> LayerList | None:
    """Return the one list of layers of a model; None if there are several, or none is known."""
    backbone = get_backbone_of(model)
    plan = find_backbone_plan(backbone) if backbone is not None else None
    if plan is None:
        return None
    return LayerList(list(backbone.get_submodule(plan.layers)), plan.layers)


def end_ranks(config: ParallelConfig) -> list[int]:
    """Return the first and the last pipeline rank, which hold embedding and head."""
    of_one_pipeline = list_axis_ranks(config, "pp")[0]
    return sorted({of_one_pipeline[0], of_one_pipeline[-1]})


@dataclass
class _Run:
    """Everything about a dry run but how many layers it has."""

    model: PreTrainedModel
    stack: LayerList | None
    config: ParallelConfig
    rank: int
    rows: int
    seq: int
    accumulation: int
    optimizer: str
    precision: str
    adapt: Callable[[nn.Module], None] | None
    pack: Packing | None
    away: frozenset[str]  # kinds of memory that are the host's
    device: torch.device

    def continued(self, fewest: tuple[int, ...], counts: tuple[int, ...]) -> Observed:
        """Observe `counts` layers on this rank's stages, from runs with `fewest` and with one more on each.

        Of `activation_checkpointing=every:N` it is N more, of which one is recomputed.
        """
        every = read_recompute_interval(self.config.recompute_way) or 1
        base = self.observe(fewest)
        total = copy.deepcopy(base)
        for i, (have, want) in enumerate(zip(fewest, counts, strict=True)):
            if want > have:
                more = self.observe(tuple(n + every * (i == j) for j, n in enumerate(fewest)))
                _extend(total, base, more, (want - have) // every)
        return total

    def observe(self, counts: tuple[int, ...]) -> Observed:
        """Observe so many layers on each of this rank's stages; other ranks' stages get one each."""
        model, config = self._shorten_model(counts)
        try:
            partner = self._describe_partner(counts) if config.mirrors_stages else None
            with pretend_world(self.rank, config.world_size):
                return self._step(model, config, partner)
        except _NEEDS_VALUES as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            eager = getattr(model.config, "_experts_implementation", None) == "eager"
            works = '; experts_implementation="grouped_mm" works' if eager else ""
            refuse(
                "dry run",
                f"{type(model).__name__} looks at values, which fake tensors do not have ({first}){works}",
                cause=error,
            )

    def _shorten_model(self, counts: tuple[int, ...]) -> tuple[PreTrainedModel, ParallelConfig]:
        model, config = copy.deepcopy(self.model), self.config
        if self.stack is None or counts == (len(self.stack.layers),):
            return model, config
        if config.pp_size > 1:
            here = dict(zip(_list_stages_run(config, self.rank), counts, strict=True))
            split = tuple(here.get(stage, 1) for stage in range(config.pipeline_stages))
            config = dataclasses.replace(config, pipeline_split=split)
            counts = split
        backbone, name = get_backbone_of(model), self.stack.name
        backbone.set_submodule(name, nn.ModuleList(list(backbone.get_submodule(name))[: sum(counts)]))
        return model, config

    def _describe_partner(self, counts: tuple[int, ...]) -> StageDescription:
        """Return how the rank that owns the mirrored stage describes it, which no message brings here."""
        model, config = self._shorten_model(counts)
        pipeline = next(ranks for ranks in list_axis_ranks(config, "pp") if self.rank in ranks)
        with pretend_world(pipeline[-1 - pipeline.index(self.rank)], config.world_size):
            engine = self._parallelize(model, config).pipeline
            assert engine is not None
            assert engine.mirror is not None
            return engine.mirror.describe_stage()

    def _parallelize(self, model: PreTrainedModel, config: ParallelConfig) -> ParallelState:
        model.train()
        parallelize_model(model, mesh=ParallelMesh.create(config, self.device), pack=self.pack)
        if self.adapt is not None:
            self.adapt(model)
        state = state_of(model)
        assert state is not None
        return state

    def _step(self, model: PreTrainedModel, config: ParallelConfig, partner: StageDescription | None) -> Observed:
        state = self._parallelize(model, config)
        if state.pipeline is not None and state.pipeline.mirror is not None:
            state.pipeline.mirror.theirs = partner
        views = [view.layers for view in state.pipeline.views] if state.pipeline else [list_transformer_blocks(model)]
        if config.pp_size > 1:
            from torch.distributed import pipelining  # noqa: F401  it makes a constant, which must be no fake tensor
        with fake_tensors_pass_as_real(), Shapes(allow_non_fake_inputs=True):
            materialise_weights(model, self.device)
            shape = (self.rows, self.seq)
            tokens = [torch.zeros(shape, dtype=torch.long, device=self.device) for _ in range(self.accumulation)]
            batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
            layers = tuple(tuple(view) for view in views if view)
            seen = observe(model, batches, self.optimizer, PRECISIONS[self.precision][1], layers, _ANY_VALUE)
        for held in (*seen.peaks, seen.kept):
            for kind in self.away & held.keys():
                del held[kind]
        return seen


def _extrapolate_micro_batches(run: _Run, fewest: tuple[int, ...], counts: tuple[int, ...]) -> Observed:
    """Extrapolate a long schedule from two short ones: once it is full, each round of micro-batches adds the same.

    But where all forwards come first: what is held then grows with each, and may pass what was fullest in short ones.
    """
    ranks, schedule = run.config.pp_size, run.config.pipeline_schedule
    asked = count_micro_batches(run.rows, run.config) if ranks > 1 else 1
    # With `few` micro-batches, of those that lead to `asked`, a schedule is full, and `step` make a round. With
    # several stages on a rank, which take turns, it takes longer until it is full.
    few, step = (4 if schedule in LOOPED_SCHEDULES else 2) * ranks + asked % ranks, ranks
    if schedule in V_SCHEDULES:
        few, step = 2 * ranks + 1, 1
    if ranks == 1 or asked <= few + step or schedule in _FORWARDS_FIRST:
        return run.continued(fewest, counts)
    one, two = (
        dataclasses.replace(
            run, config=dataclasses.replace(run.config, pipeline_microbatches=count), rows=run.rows // asked * count
        ).continued(fewest, counts)
        for count in (few, few + step)
    )
    one, two = (dataclasses.replace(seen, peaks=[seen.peak]) for seen in (one, two))
    total = copy.deepcopy(one)
    _extend(total, one, two, (asked - few) // step)
    return total


def _extend(total: Observed, base: Observed, more: Observed, times: int) -> None:
    """Add to `total` what one further layer, or round of micro-batches, adds (`more` - `base`), `times` times."""
    held = [(*seen.peaks, seen.kept) for seen in (total, base, more)]
    for whole, one, two in zip(*held, strict=True):
        for kind in {*one, *two}:
            whole[kind] += times * (two[kind] - one[kind])
    for axis, kinds in more.communication.items():
        mine, former = total.communication.setdefault(axis, {}), base.communication.get(axis, {})
        for kind, moved in kinds.items():
            mine[kind] = mine.get(kind, Traffic()).grown(former.get(kind, Traffic()), moved, times)
