"""A script's own loss in a schedule: what it calls, how its batch may be cut, and one micro-batch of it at a time.

In its first step the loss runs on whole batches (`unscheduled.py`), which shows the calls it makes. Then random noise
is added to the models' outputs, and their loss is computed once from the whole batch and once from parts. If a way of
cutting gives the same number, the schedule may cut so. Examples are cut, not rows: in a batch of [chosen; rejected] an
example has two rows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

from hf_parallel.axes.pipeline.batches import (
    count_blocks,
    count_causal_targets,
    count_rows,
    split_examples,
    tokens_of,
)
from hf_parallel.axes.pipeline.engine import run_scheduled
from hf_parallel.axes.pipeline.schedules import can_be_cut, count_micro_batches
from hf_parallel.axes.pipeline.stage_runner import Session
from hf_parallel.axes.pipeline.stages import LeaveAtExit
from hf_parallel.axes.pipeline.unscheduled import (
    Call,
    Made,
    Serving,
    describe_call,
    free,
    restore_described_state,
)
from hf_parallel.model.calls import Batch
from hf_parallel.model.known_masks import KnownMask, find_known_mask, use_known_mask
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from typing import NoReturn

    from transformers.utils import ModelOutput

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.pipeline.engine import PipelineEngine
    from hf_parallel.axes.pipeline.stage_runner import StageRunner
    from hf_parallel.axes.pipeline.stages import StageView


_OTHERWISE = (
    "hf_parallel: the loss called its models otherwise than in its first step; in a pipeline every step must call the "
    "same ones in the same order, with the same arguments"
)
_OTHER_LOSS = (
    "hf_parallel: the script's loss is computed in another way than in former steps, and is neither a sum nor a mean "
    "over the examples of its batch any more; pp_size=1 works, and so does a loss that is so from the first step on"
)

Loss = Callable[[Batch], torch.Tensor]
Quietly = Callable[[], contextlib.AbstractContextManager]
Answer: TypeAlias = Any  # the output of a call, or a function of the engine and the arguments that returns it


@dataclass(frozen=True)
class Cut:
    """A way to cut a batch into micro-batches: rows per example, and whether the loss is a mean over examples."""

    rows: int
    mean: bool


CUTS = (Cut(1, False), Cut(1, True), Cut(2, False), Cut(2, True))


@dataclass
class Plan:
    """The facts of a script's loss that are known after its first step."""

    calls: list[Call]
    main: int  # number of the call that has a gradient
    cut: Cut
    logs: bool = False  # does the script log while it computes the loss?
    kinds: dict[frozenset, Cut] = field(default_factory=dict)  # the cuts that were found, by the loss's operations

    @property
    def why_apart(self) -> str | None:
        """Return why the batches of a step cannot run as one schedule: because other calls come between them."""
        if self.calls[self.main].has_tensors:
            return "it gives the model tensors that it makes itself"
        others = [call for i, call in enumerate(self.calls) if i != self.main]
        return None if all(map(self.is_repeated, others)) else "it calls models without gradients, too"

    def is_repeated(self, call: Call) -> bool:
        """Return whether this call repeats the main one without gradient. Then its activations arrive anyway."""
        main = self.calls[self.main]
        return not main.has_tensors and call.alike(dataclasses.replace(main, grad=call.grad))


# ---- the first step -------------------------------------------------------------------------------------------------


def find_plan(
    engine: StageRunner, batch: Batch, made: list[Made], loss_of: Loss, quietly: Quietly, counts: bool = True
) -> Plan | None:
    """Find how the loss may be scheduled; return None if it needs whole batches. Collective over all ranks.

    Args:
        made: the calls of `loss_of(batch)`, as `serve_script` returns them.
        quietly: a context that undoes what the script counts and collects inside.
        counts: give the model the number of targets of the whole batch if the script gives it none.
    """
    suits = sum(call.grad for call in (one.call for one in made)) == 1 and not any(
        one.balance is not None or (one.call.has_tensors and not one.call.grad) for one in made
    )
    verdicts = torch.full((len(CUTS),), float(suits or not engine.last), device=engine.mesh.device)
    for trial in range(_TRIALS):
        if engine.last and suits and verdicts.any():
            with quietly(), engine.mesh.fork_random_state(), count_over_whole_batch(engine, batch, counts):
                found = Session(engine).run(functools.partial(_test_cuts, engine, batch, made, loss_of, trial))
                verdicts *= found.to(verdicts.device)
        dist.all_reduce(verdicts, op=dist.ReduceOp.MIN)  # all ranks go the same way, also to the next trial
    cut = next((cut for cut, holds in zip(CUTS, verdicts.tolist(), strict=True) if holds), None)
    calls = [[one.call for one in made]]
    dist.broadcast_object_list(calls, group=engine.control, group_src=engine.last_rank)
    return None if cut is None else Plan(calls[0], next(i for i, call in enumerate(calls[0]) if call.grad), cut)


@dataclass(eq=False)
class Prepared(Session):
    """A session whose answers are known before the calls, in their order."""

    answers: list[Answer]  # taken out one by one
    seen: list[ModelOutput] = field(default_factory=list)

    def answer(self, engine: StageRunner, kwargs: Batch) -> ModelOutput:
        if not self.answers:
            raise RuntimeError(_OTHERWISE)
        ready = self.answers.pop(0)
        self.seen.append(ready(engine, kwargs) if callable(ready) else ready)
        return self.seen[-1]


#: Trials of how a loss may be cut. Parts of the first one may have as many targets by chance, and a script's weights
#: may be alike in the first batch; the second one changes what a script may count.
_TRIALS = 2


def _test_cuts(engine: StageRunner, batch: Batch, made: list[Made], loss_of: Loss, trial: int) -> torch.Tensor:
    """Return for each of `CUTS` whether the losses of parts make up that of the batch, on disturbed outputs.

    All data ranks compute as many losses, in which a script may ask others. In a trial after the first one a cut holds
    also if the script has no loss of a changed batch, or an infinite one.
    """
    generator = torch.Generator().manual_seed(trial)  # ranks that share a sequence or a vocabulary disturb alike
    rows, held = count_rows(batch), []
    disturbed = disturb_batch(getattr(engine.model.config, "pad_token_id", None), batch, generator)
    if trial:
        disturbed = change_columns(disturbed, torch.ones(rows), generator)
    outputs = [_disturb_output(one.output, generator) for one in made]

    def compute(answers: list[Answer], part: Batch) -> torch.Tensor:
        return Prepared(engine, answers).run(functools.partial(loss_of, part))

    with torch.no_grad():
        whole = _compute_if_any(compute, list(outputs), dict(disturbed))
        for cut in CUTS:
            can_cut = rows % cut.rows == 0 and can_be_cut(rows // cut.rows, engine.config)
            count = count_micro_batches(rows // cut.rows, engine.config) if can_cut else 0
            holds = can_cut and _does_cut_hold(cut, count, whole, disturbed, outputs, compute)
            held.append(can_cut and bool(trial) if holds is None else holds)
    return torch.tensor(held).float()


def _compute_if_any(
    compute: Callable[[list[Answer], Batch], torch.Tensor], answers: list[Answer], batch: Batch
) -> torch.Tensor:
    """Return the loss of a batch; not a number where the script has none."""
    try:
        return compute(answers, batch).detach().float()
    except Exception:  # whatever a script does with other examples than a loader's
        return torch.tensor(torch.nan)


def _does_cut_hold(
    cut: Cut,
    count: int,
    whole: torch.Tensor,
    batch: Batch,
    outputs: list[ModelOutput],
    compute: Callable[[list[Answer], Batch], torch.Tensor],
) -> bool | None:
    """Return whether the losses of `count` parts make up `whole`; None where one of them is no number.

    `compute` returns a part's loss, by answers. A loss of zero, as of no targets, is the sum of any parts.
    """
    rows = count_rows(batch)
    picked = [_pick_micro_batches(output, count, cut.rows, rows) for output in outputs]
    parts = split_examples(batch, count, cut.rows, rows)
    losses = [_compute_if_any(compute, [one[i] for one in picked], part) for i, part in enumerate(parts)]
    total = torch.stack([loss.to(whole.device) for loss in losses]).sum() / (count if cut.mean else 1)
    if not bool(whole.isfinite()) or not bool(total.isfinite()):
        return None
    # The noise sets other ways of cutting apart by far more than bf16 rounds.
    exact = all(output["last_hidden_state"].dtype == torch.float32 for output in outputs)
    return bool(whole) and torch.allclose(total, whole, rtol=1e-4 if exact else 2e-2)


def _disturb_output(output: ModelOutput, generator: torch.Generator) -> ModelOutput:
    """Add noise, so that a policy differs from its reference and examples from each other, as they will later."""
    hidden = output["last_hidden_state"].detach()
    noise = torch.randn(hidden.shape, generator=generator).to(hidden)
    return _with_hidden(output, hidden + noise * hidden.float().std().to(hidden.dtype))


def disturb_batch(padding: int | None, batch: Batch, generator: torch.Generator) -> Batch:
    """Remove tokens at the end of each row, more in some: then a mean over tokens is no mean over examples.

    Args:
        padding: the number of the token that stands where there is none, if the model has one.
    """
    changed = dict(batch)
    for key, value in batch.items():
        if not torch.is_tensor(value) or value.dim() != 2 or value.is_floating_point():
            continue
        if key == "prompt_mask":  # at a prompt's last token the first one of its completion is predicted
            continue
        fill: int | None
        if key.endswith("labels"):
            fill = -100
        elif value.dtype == torch.bool or ("mask" in key and value.max() <= 1 and value.min() >= 0):
            fill = 0
        else:
            fill = padding if key.endswith("input_ids") else None
        if fill is not None:  # the value that stands where there is no token
            keep = torch.randint((value.shape[1] + 1) // 2, value.shape[1] + 1, value.shape[:1], generator=generator)
            beyond = torch.arange(value.shape[1]) >= keep[:, None]
            changed[key] = value.masked_fill(beyond.to(value.device), fill)
    # What tells targets has none where there is no token, as collators make it, and as some kernels need it.
    for key, fill in (("labels", -100), ("completion_mask", 0)):
        for prefix in ("", "KL_"):
            mask, targets = changed.get(f"{prefix}attention_mask"), changed.get(f"{prefix}{key}")
            if torch.is_tensor(mask) and torch.is_tensor(targets) and targets.shape == mask.shape:
                changed[f"{prefix}{key}"] = targets.masked_fill(mask == 0, fill)
    return changed


def change_columns(batch: Batch, chosen: torch.Tensor, generator: torch.Generator) -> Batch:
    """Halve weights, and take another class or token of the batch, at half of the places of chosen rows.

    A script may count some of them.

    Args:
        chosen: [rows], 1 or 0.
    """
    changed, rows = dict(batch), len(chosen)
    for key, value in batch.items():
        if not torch.is_tensor(value) or value.dim() not in (1, 2) or len(value) != rows or value.dtype == torch.bool:
            continue
        places = torch.rand(value.shape, generator=generator) < 0.5 * chosen.view(-1, *[1] * (value.dim() - 1))
        if value.is_floating_point():
            changed[key] = torch.where(places.to(value.device), value / 2, value)
        elif value.dim() == 1 or key.endswith("input_ids"):
            others = torch.randint(value.numel(), value.shape, generator=generator).to(value.device)
            changed[key] = torch.where(places.to(value.device), value.flatten()[others], value)
    return changed


@contextlib.contextmanager
def count_over_whole_batch(engine: StageRunner, batch: Batch, wanted: bool, share: float = 1.0) -> Iterator[None]:
    """Let a model to which the script gives no count take its mean over the targets of the whole batch.

    The batch is that of all data ranks.

    Args:
        share: the factor by which the loss will be multiplied.
    """
    items = None
    if wanted and torch.is_tensor(batch.get("labels")) and engine.sums_over_tokens:
        items = count_causal_targets(batch)
        if engine.mesh.data_size > 1:
            dist.all_reduce(items, group=engine.mesh.data_group)
            items = items * (share / engine.mesh.data_size)
    with use_given_count(engine, items):
        yield


@contextlib.contextmanager
def use_given_count(engine: StageRunner, items: torch.Tensor | None) -> Iterator[None]:
    """Let the model's own mean run over this count of targets where the script gives it none."""
    former, engine.items = engine.items, items
    try:
        yield
    finally:
        engine.items = former


# ---- the other steps ------------------------------------------------------------------------------------------------


def can_cut_alike(examples: Iterable[int], config: ParallelConfig) -> bool:
    """Return whether the batches of all data ranks are cut into equally many micro-batches.

    Means over targets inside a model are weighed over data ranks micro-batch by micro-batch.

    Args:
        examples: the number of examples of each data rank.
    """
    sizes = list(examples)
    return all(can_be_cut(n, config) for n in sizes) and len({count_micro_batches(n, config) for n in sizes}) == 1


def can_cut_batch(plan: Plan, batch: Batch, config: ParallelConfig) -> bool:
    """Return whether the schedule can cut this batch."""
    rows = count_rows(batch)
    return rows % plan.cut.rows == 0 and can_be_cut(rows // plan.cut.rows, config)


def run_plan(
    engine: PipelineEngine,
    plan: Plan,
    batch: Batch,
    loss_of: Loss,
    try_loss_of: Loss,
    quietly: Quietly,
    counts: bool = True,
    share: float = 1.0,
) -> torch.Tensor:
    """Run a script's loss under the schedule and return it. Its backward pass only adds the gradients, known by then.

    Args:
        try_loss_of: as `loss_of`, but undoes what the script counts and collects.
        share: the weight of this data rank's loss in the average over data ranks.
    """
    rows, cut, device = count_rows(batch), plan.cut, engine.mesh.device
    count = count_micro_batches(rows // cut.rows, engine.config)
    parts = split_examples(batch, count, cut.rows, rows)
    beside = [_run_calls_beside(engine, plan, call, batch, count) for call in plan.calls]
    group: Any = engine.mesh.data_group

    def count_meetings() -> int:
        # Collectives over data ranks. In a mixed group the backends of host and device each count their own.
        backends = (group._get_backend(device) for device in group._device_types)
        return sum(backend._get_sequence_number_for_group() for backend in backends)

    with count_over_whole_batch(engine, batch, counts, share):
        calls, items = _make_main_calls(engine, plan, parts, beside, loss_of, quietly), engine.items
        main, known = plan.calls[plan.main], None
        if not main.has_tensors and engine.joint is None:  # of a batch that was announced, nothing runs here
            taken = main.arguments(batch, device)
            known = find_known_mask(taken, tokens_of(taken))

        def run(view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
            if view.index != engine.last_index:
                with restore_described_state(engine, calls[i]), use_known_mask(known):
                    kwargs = calls[i].arguments(parts[i], device)
                    return engine.run_as_stage(view, None, lambda: engine.run_backbone(hidden, kwargs))

            def compute(answers: list[Answer], part: Batch, loss_of: Loss) -> tuple[torch.Tensor, Prepared]:
                session = Prepared(engine, answers)
                with session.active(), use_given_count(engine, items):  # the batch may run with others
                    answer = functools.partial(session.answer, engine)
                    loss = engine.run_as_stage(view, answer, lambda: loss_of(part))
                if session.answers:  # fewer calls than before
                    raise RuntimeError(_OTHERWISE)
                return loss, session

            answers = _make_answers(engine, plan, parts[i], [outputs[i] for outputs in beside], hidden, known)
            met = count_meetings()
            loss, session = compute(answers, dict(parts[i]), loss_of)
            met = count_meetings() - met
            found = _find_cut_of_part(
                *(plan, parts[i], session.seen, loss, engine),
                lambda given, part: compute(given, part, try_loss_of)[0],
                together=engine.mesh.data_size > 1 and met > 0,
            )
            return loss * (share / count if found.mean else share)

        return run_scheduled(engine, count, tokens_of(calls[0].arguments(parts[0], device)), run)


def _find_cut_of_part(
    plan: Plan,
    part: Batch,
    outputs: list[ModelOutput],
    loss: torch.Tensor,
    engine: StageRunner,
    compute: Callable[[list[Answer], Batch], torch.Tensor],
    together: bool,
) -> Cut:
    """Return whether the batch's loss is the sum or the mean of its micro-batches' losses.

    A script may change that from step to step. We tell ways of computing a loss apart by their operations. A new way
    is tried on a disturbed batch of this micro-batch and a copy of it.

    Args:
        compute: returns the loss of a batch by these answers, on the last stage, and undoes everything else.
        together: the loss has called collectives over data ranks. Then all ranks try a way that is new to one of
            them, because each of the loss's collectives waits for all ranks.

    Raises:
        RuntimeError: it is neither the sum nor the mean.
    """
    # The kinds of operations between the models' outputs and the loss.
    operations, known, waiting = set(), {output["last_hidden_state"].grad_fn for output in outputs}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            operations.add((node.name(), getattr(node, "_saved_reduction", None)))
            waiting += [after for after, _ in node.next_functions]
    kind = frozenset(operations)
    is_new = torch.tensor(kind not in plan.kinds, dtype=torch.int32, device=engine.mesh.device if together else "cpu")
    if together:
        dist.all_reduce(is_new, dist.ReduceOp.MAX, group=engine.mesh.data_group)
    if not is_new:
        return plan.kinds[kind]
    rows, generator = count_rows(part), torch.Generator().manual_seed(0)
    each = plan.cut.rows
    padding = getattr(engine.model.config, "pad_token_id", None)
    double = disturb_batch(padding, _double_examples(part, each, rows), generator)
    answers = []
    for output in outputs:
        twice = _double_examples({"hidden": output["last_hidden_state"]}, each, rows)["hidden"]
        answers.append(_disturb_output(_with_hidden(output, twice), generator))
    with engine.mesh.fork_random_state():  # with gradients, for which a script may ask
        whole = compute(list(answers), dict(double)).detach().float()
        cuts = (plan.cut, dataclasses.replace(plan.cut, mean=not plan.cut.mean))
        found = [cut for cut in cuts if _does_cut_hold(cut, 2, whole, double, answers, compute)]
    if kind in plan.kinds:  # it was new to another data rank only
        return plan.kinds[kind]
    if not bool(whole) or not bool(whole.isfinite()):  # a loss of no targets, or of an overflow, tells nothing
        return plan.cut
    if not found:
        raise RuntimeError(_OTHER_LOSS)
    return plan.kinds.setdefault(kind, found[0])


def _double_examples(batch: Batch, rows_each: int, rows: int) -> Batch:
    """Return a batch with each example twice, so that `split_examples` cuts it into two equal halves."""
    doubled = dict(batch)
    for key, value in batch.items():
        blocks = count_blocks(value, rows_each, rows)
        if blocks:
            each = len(value) // blocks
            pieces = [value[block * each : (block + 1) * each] for block in range(blocks) for _ in range(2)]
            doubled[key] = (
                torch.cat(pieces) if torch.is_tensor(value) else [item for piece in pieces for item in piece]
            )
    return doubled


def _run_calls_beside(
    engine: StageRunner, plan: Plan, call: Call, batch: Batch, count: int
) -> list[ModelOutput | None]:
    """Run a call without gradient on the whole batch, before the schedule starts; return its output by micro-batch."""
    if call.grad or plan.is_repeated(call):
        return [None] * count
    session, other = Serving(engine, batch), engine.pipelines.engine(call.model)
    if engine.last:
        with session.active():
            output = session.run_in_last_stage(other, lambda: session.forward(call, batch))
    else:
        output = session.forward(call, batch)
    if other is not engine:
        free(other)
    return _pick_micro_batches(output, count, plan.cut.rows, count_rows(batch)) if engine.last else [None] * count


def _make_main_calls(
    engine: StageRunner, plan: Plan, parts: list[Batch], beside: list[list], loss_of: Loss, quietly: Quietly
) -> list[Call]:
    """Return the main call for each micro-batch. The last stage sends the tensors that the script makes for it."""
    main = plan.calls[plan.main]
    if not main.has_tensors:
        return [main] * len(parts)

    def made(i: int, part: Batch) -> Call:
        answers = _make_answers(engine, plan, part, [outputs[i] for outputs in beside], None)
        answers[plan.main] = functools.partial(_leave_with_call, part)
        with quietly():
            return cast(Call, Prepared(engine, answers).run(functools.partial(loss_of, dict(part))))

    return messages.send_from_one(lambda: [made(*part) for part in enumerate(parts)], engine.control, engine.last_rank)


def _leave_with_call(part: Batch, engine: StageRunner, kwargs: Batch) -> NoReturn:
    raise LeaveAtExit(describe_call(engine, kwargs, part))


def _make_answers(
    engine: StageRunner,
    plan: Plan,
    part: Batch,
    outputs: list[ModelOutput | None],
    hidden: torch.Tensor | None,
    known: KnownMask | None = None,
) -> list[Answer]:
    """Return what each call of the loss of one micro-batch gets, on the last stage.

    Args:
        known: facts of the batch's mask. Only this model's layers are told, because a script may call other models.
    """

    def answer(expected: Call, output: ModelOutput | None, caller: StageRunner, kwargs: Batch) -> ModelOutput:
        if not describe_call(caller, kwargs, part, values=False).alike(expected):
            raise RuntimeError(_OTHERWISE)
        if output is not None:
            return output
        with use_known_mask(known):
            return engine.run_backbone(hidden if expected.grad or hidden is None else hidden.detach(), kwargs)

    return [functools.partial(answer, call, output) for call, output in zip(plan.calls, outputs, strict=True)]


def _pick_micro_batches(output: ModelOutput, count: int, rows_each: int, rows: int) -> list[ModelOutput]:
    """Split the output of a call into micro-batches."""
    parts = split_examples({"hidden": output["last_hidden_state"]}, count, rows_each, rows)
    return [_with_hidden(output, part["hidden"]) for part in parts]


def _with_hidden(output: ModelOutput, hidden: torch.Tensor) -> ModelOutput:
    changed = copy.copy(output)
    changed["last_hidden_state"] = hidden
    return changed
