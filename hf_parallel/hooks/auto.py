"""`--parallel auto`: wait until the script shows its model, choose a layout for it, go on under that layout.

The processes are connected at once, so that everything else starts as under any spec. The choice is made by rank 0
and sent to the others: what it detects about its machine need not be what they would measure. The model is known at
the first of: `from_pretrained`, `Trainer(model=…)`, `Accelerator.prepare(model)`; the batch from TrainingArguments,
else from the script's command line. Which of several models comes first decides for all.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.keys.data import FOLDER_TO_NAME, offload_folder
from hf_parallel.ask.launched import read_local_world_size
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import logits_read
from hf_parallel.hooks.patching import Patch, Undo, apply_patches, apply_when_imported, around, undo
from hf_parallel.hooks.trainer.settings import is_evaluating
from hf_parallel.hooks.transformers import ask_hub, cached_files
from hf_parallel.model.calls import bind_by_name

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from hf_parallel.axes.axis import Packing
    from hf_parallel.planner.choices import Found
    from hf_parallel.planner.detect import Device
    from hf_parallel.planner.groups import MixedCluster
    from hf_parallel.planner.hardware import Cluster

_LONGEST_ASSUMED = 2048  # tokens per row where nothing says how long rows are
_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length")
T = TypeVar("T")


class Waiting(NamedTuple):
    """Who asked for a choice, what is then called with the layout, and for which machines; default: detected ones."""

    source: str
    activate: Callable[[ParallelConfig, str], None]
    cluster: Cluster | MixedCluster | None


@dataclass
class _Shown:
    """The request for a choice, and what the script has shown before its model.

    Attributes:
        arguments: the TrainingArguments that were made last.
        adapter: the config of PEFT that was made last.
    """

    waiting: Waiting | None = None
    arguments: TrainingArguments | None = None
    adapter: PeftConfig | None = None
    undo_list: list[Undo] = field(default_factory=list)


#: Arguments of TRL's trainers whose losses are means over examples.
_OF_EXAMPLES = {"SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig"}
_DEFAULT_RANK = 16  # of adapters that the command line asks for without saying how large


def who_waits() -> str | None:
    """Return who asked for a choice that is not made yet; None if nobody did."""
    waiting = of_session(_Shown).waiting
    return None if waiting is None else waiting.source


def wait(
    source: str, activate: Callable[[ParallelConfig, str], None], cluster: Cluster | MixedCluster | None = None
) -> None:
    """Connect the processes, and choose as soon as there is a model.

    Args:
        activate: is then called with the layout and who asked for it.
        cluster: to choose for; default: this machine, or these.
    """
    shown = of_session(_Shown)
    if shown.waiting is not None:
        return
    from hf_parallel.hooks import runtime

    runtime.connect_process_group()
    shown.waiting = Waiting(source, activate, cluster)
    model = "transformers.modeling_utils:PreTrainedModel.from_pretrained"
    patches = [
        Patch("transformers.utils.hub:cached_files", around(cached_files), "waits for the Hub"),
        Patch("huggingface_hub.utils._http:http_backoff", around(ask_hub), "waits for the Hub", copies=True),
        Patch(model, around(_choose_at_from_pretrained), "shows the model that a layout is chosen for"),
        Patch("transformers.trainer:Trainer.__init__", around(_choose_at_trainer), "shows a model built in code"),
        Patch("accelerate.accelerator:Accelerator.prepare", around(_choose_at_prepare), "shows a model of a loop"),
    ]
    shown.undo_list.extend(apply_patches(patches))
    made = Patch("peft.config:PeftConfig.__post_init__", around(_remember_adapter), "shows adapters to come")
    shown.undo_list.append(apply_when_imported("peft", [made]))


def remember_arguments(arguments: TrainingArguments) -> None:
    """Remember the TrainingArguments that were made last: they know the batch."""
    shown = of_session(_Shown)
    if shown.waiting is not None:
        shown.arguments = arguments


def stop_waiting() -> None:
    """Forget what was asked for and undo the patches."""
    shown = of_session(_Shown)
    undo(shown.undo_list)
    shown.waiting = shown.arguments = shown.adapter = None


def check_chosen() -> None:
    """Check, at the end of a script, that a layout was chosen.

    Raises:
        SpecError: the script never showed a model, so every process ran it alone.
    """
    if who_waits() is not None:
        refuse(
            f"{who_waits()} asks for auto",
            "the script showed no Transformers model to from_pretrained, Trainer or Accelerator.prepare",
            "tp=2,dp_shard=-1",
        )


def _choose_at_from_pretrained(
    original: Callable,
    cls: type[PreTrainedModel],
    pretrained_model_name_or_path: str | None = None,
    *args: object,
    **kwargs: Any,
) -> object:
    source, config = pretrained_model_name_or_path, kwargs.get("config")
    if config is None or isinstance(config, str):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(config or source, trust_remote_code=kwargs.get("trust_remote_code"))
    asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
    kernel, reader = kwargs.get("attn_implementation"), logits_read.find_script_reader(of_session(_Shown).arguments)
    packed = kwargs.get("quantization_config")
    packed = packed if getattr(packed, "load_in_4bit", False) else None
    dtype = None if asked == "auto" else asked
    choose_layout_here(Shown(config, dtype, kernel=kernel, reader=reader, quantization=packed))
    return cls.from_pretrained(source, *args, **kwargs)  # the layout's own by now


def _remember_adapter(original: Callable, self: PeftConfig) -> None:
    original(self)
    of_session(_Shown).adapter = self


def _choose_at_trainer(
    original: Callable,
    self: Trainer,
    model: PreTrainedModel | str | None = None,
    args: TrainingArguments | None = None,
    *rest: object,
    **kwargs: object,
) -> None:
    shown = of_session(_Shown)
    shown.arguments = args or shown.arguments
    if model is None:
        refuse(f"{who_waits()} asks for auto", "Trainer(model_init=…) shows its model too late", "tp=2")
    reader = logits_read.find_trainer_reader(
        type(self), bind_by_name(original, (self, model, args, *rest), kwargs), shown.arguments
    )
    choose_layout_here(_describe_model(model, None, reader))
    from transformers import Trainer

    Trainer.__init__(self, model, args, *rest, **kwargs)


def _choose_at_prepare(original: Callable, self: Accelerator, *args: Any, **kwargs: object) -> object:
    model = next((arg for arg in args if hasattr(getattr(arg, "config", None), "model_type")), None)
    if model is None:
        return original(self, *args, **kwargs)
    lowered, reader = self.mixed_precision, logits_read.LOOP_READER
    choose_layout_here(_describe_model(model, lowered, reader))
    return type(self).prepare(self, *args, **kwargs)


# ---- the choice --------------------------------------------------------------------------------------------------


def _describe_model(model: object, lowered: str | None, reader: str | None) -> Shown:
    dtype = next((p.dtype for p in getattr(model, "parameters", list)() if p.is_floating_point()), None)
    adapters = (getattr(model, "peft_config", None) or {}).values()
    for adapter in adapters:
        of_session(_Shown).adapter = adapter
    rank = max((int(getattr(one, "r", 0) or 0) for one in adapters), default=0)
    return Shown(getattr(model, "config", model), dtype, lowered, rank, reader=reader)


class Shown(NamedTuple):
    """The model that a script shows first, and what is known of it by then.

    Attributes:
        dtype: of the weights; default: what the config says.
        lowered: the dtype of products under autocast: bf16, fp16, no; default: what the script's arguments say.
        adapters: rank of the model's adapters; default: of those that the script is known to add.
        kernel: of attention, if the script names it.
        reader: what reads whole logits, which then need memory.
        quantization: of a base that the script loads in 4 bits.
    """

    config: PretrainedConfig
    dtype: torch.dtype | str | None = None
    lowered: str | None = None
    adapters: int = 0
    kernel: str | None = None
    reader: str | None = None
    quantization: BitsAndBytesConfig | None = None

    def is_planned_in_four_bits(self, precision: str) -> bool:
        """Return whether the planner knows this base: packed, with products and all else in bf16."""
        return (
            self.quantization is not None
            and precision == "bf16"
            and "bfloat16" in str(self.quantization.bnb_4bit_compute_dtype)
        )


def choose_layout_here(shown: Shown) -> None:
    """Choose for this model and activate the layout. Collective."""
    from hf_parallel.hooks import report, runtime
    from hf_parallel.planner.detect import read_device_here
    from hf_parallel.ranks import messages

    asked = of_session(_Shown).waiting
    assert asked is not None
    source, activate, _ = asked
    devices = messages.gather_objects(read_device_here())
    try:
        chosen = messages.send_from_one(lambda: _find_best(shown, devices))
    except SpecError as error:
        refuse("parallel=auto", str(error))
    finally:
        stop_waiting()
    for line in chosen.said:
        report.say(line)
    activate(ParallelConfig.parse(chosen.spec), f"{source} (auto)")
    active = runtime.current()
    if active is not None:
        active.chosen_because = chosen.reasons


class Chosen(NamedTuple):
    """A layout, the lines to say about it, and the lines of its reasons and of the next two layouts."""

    spec: str
    said: tuple[str, ...]
    reasons: tuple[str, ...]


def _find_best(shown: Shown, devices: list[Device]) -> Chosen:
    """Rank the layouts for the script's model and batch on these machines.

    Args:
        devices: of each process. If devices of one kind are not consecutive, no layout by groups is possible, and
            the slowest kind and the least memory count for all.
    """
    import torch.distributed as dist

    from hf_parallel.hooks.peft.before import are_adapters_kept_whole
    from hf_parallel.hooks.trainer import joining
    from hf_parallel.planner.detect import detect
    from hf_parallel.planner.groups import MixedCluster, find_machines_of_ranks
    from hf_parallel.planner.search import search

    asked = of_session(_Shown).waiting
    cluster, why = None if asked is None else asked.cluster, ""
    if cluster is None:
        cluster, why = find_machines_of_ranks(detect(dist.get_world_size(), read_local_world_size()), devices)
    turns = [f"auto plans for the slowest GPU and the least memory of all: {why}"] if why else []
    batch = read_script_batch(shown.config, None, shown.dtype, shown.lowered)
    four_bit = shown.is_planned_in_four_bits(batch.precision)
    rank = shown.adapters or batch.lora or _DEFAULT_RANK * four_bit
    options: dict[str, Any] = {
        "model": shown.config,
        "seq": batch.seq,
        "global_batch": None,
        "rows": batch.rows,
        "accumulation": batch.accumulation,
        "precision": batch.precision,
        "optimizer": batch.optimizer,
        "lora": rank,
        "four_bit": four_bit,
        "top": 3,
        **make_engine_options(shown.config, rank, shown.quantization),
        "attention": shown.kernel,
        "documents": batch.documents,
        "whole_logits": shown.reader is not None,
    }
    takes = options["accept"]
    adapter = of_session(_Shown).adapter
    whole = adapter is not None and are_adapters_kept_whole(adapter)

    def accept(layout: ParallelConfig) -> bool:
        if whole and max(layout.tp_size, layout.pp_size, layout.ep_size) > 1:
            return False
        # A start has to write what its layout offloads; a planned layout may leave the folder to its user.
        return offload_folder(layout.offload) != FOLDER_TO_NAME and takes(layout)

    options["accept"] = accept
    if isinstance(cluster, MixedCluster):
        return _find_best_of_groups(cluster, batch, options)
    found = search(cluster=cluster, **options)
    if found.best is None:
        on_disk = search(cluster=cluster, **options | {"accept": takes, "top": 1}).best
        works = "" if on_disk is None else on_disk.config.to_spec().replace(FOLDER_TO_NAME, "/scratch")
        advice = f"in memory; auto knows no folder on a fast disk. Works: {works}" if works else found.advice
        refuse(f"no layout of {dist.get_world_size()} processes fits", advice)
    of_session(joining.Asked).planned = [found.goal], found.best.config
    reasons = [*_list_choice_reasons(found, batch, shown.reader), *turns]
    return Chosen(found.best.config.to_spec(), (format_choice(found), *turns), tuple(reasons))


# ---- unlike GPUs -------------------------------------------------------------------------------------------------


def _find_best_of_groups(mixed: MixedCluster, batch: ScriptBatch, options: dict[str, Any]) -> Chosen:
    """Rank the layouts of groups of unlike GPUs, and say if other processes than these would be faster."""
    from hf_parallel.hooks.trainer import joining
    from hf_parallel.planner.choices import TELLS
    from hf_parallel.planner.mixed import search_groups
    from hf_parallel.planner.report import describe_layout, explain_mixed_misfit, list_commands
    from hf_parallel.ranks.shares import cut_examples

    takes, arguments, why = options["accept"], of_session(_Shown).arguments, _find_reason_for_even(options["model"])

    def accept(config: ParallelConfig) -> bool:
        if config.shares is not None:
            rows = arguments.per_device_eval_batch_size if arguments is not None and is_evaluating(arguments) else None
            cut = (1,) if rows is None else cut_examples(rows * config.data_parallel_size, config.shares)
            if why is not None or min(cut) == 0:
                return False
        return takes(config)

    found = search_groups(mixed=mixed, in_order=True, **options | {"accept": accept})
    if not found.started:
        works = [] if found.best is None else list_commands(found, found.best, "start others")
        refuse(f"no layout of all {mixed.gpus} processes fits", "; ".join([explain_mixed_misfit(found), *works]))
    first, *others = found.started
    goals = [dataclasses.replace(found.goal, cluster=mixed.seen_from(group)) for group in mixed.groups]
    of_session(joining.Asked).planned = goals, first.config
    gpus = " + ".join(f"{group.cluster.gpus} x {group.cluster.gpu.name}" for group in mixed.groups)
    said = [f"auto chooses {describe_layout(first)}, by prediction, on {gpus}"]
    fastest = min(found.choices, key=lambda choice: choice.seconds_per_row)
    ratio = fastest.seconds_per_row / first.seconds_per_row
    if ratio * TELLS < 1:
        idle = [group.name for group in mixed.groups if group.name not in fastest.groups]
        remedy = f"leave {' and '.join(idle)} out" if idle else "start nodes in another order"
        said.append(f"{remedy}: {ratio:.2f} x the time per sequence, {describe_layout(fastest)}")
        said += list_commands(found, fastest, "To start it")
    reasons = [f"{batch.rows} x {batch.accumulation} rows of {batch.seq} tokens per data rank, {batch.precision}"]
    reasons += found.reasons()
    reasons += [] if why is None else [f"no layout has batch_shares: {why}"]
    reasons += [f"then {describe_layout(choice)}" for choice in others[:2]]
    return Chosen(first.config.to_spec(), tuple(said), tuple(reasons))


def _find_reason_for_even(config: PretrainedConfig) -> str | None:
    """Return why data ranks must have equally many examples, by what the script has shown; None: they need not."""
    import transformers
    from transformers.utils.generic import can_return_loss

    arguments = of_session(_Shown).arguments
    if arguments is None:
        return "the script has shown no TrainingArguments, and a loop may weigh its losses itself"
    kinds = (cls for cls in type(arguments).__mro__ if cls.__module__.startswith(("trl.", "sentence_transformers.")))
    kind = next(kinds, None)
    if kind is not None and kind.__name__ not in _OF_EXAMPLES:
        return f"{kind.__name__} is of a trainer that compares the examples of a batch"
    model = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if model is not None and can_return_loss(model):
        return f"the loss of {model.__name__} compares examples"
    return None


def format_choice(found: Found) -> str:
    """Say which layout was chosen, why, and what it needs and gives, by prediction."""
    first, goal = found.choices[0], found.goal
    config, p, cluster = first.config, first.prediction, goal.cluster
    several = "of the fastest layouts the one that needs least memory, on"
    gain = several if len(found.choices) > 1 else "the one layout that fits"
    per_rank = f"{first.rows} x {config.data_parallel_size} data ranks"
    return (
        f"auto chooses {config.to_spec()}, {gain} {cluster.gpus} x {cluster.gpu.name}: predicted "
        f"{first.needed_gib:.3g} of {cluster.gpu.memory_gib:.3g} GiB per device, "
        f"{p.tokens_per_s_per_gpu * cluster.gpus:,.0f} tokens/s, global batch "
        f"{first.rows * first.accumulation * config.data_parallel_size} sequences of {goal.seq} tokens ({per_rank}"
        + (f" x {first.accumulation} accumulation steps)" if first.accumulation > 1 else ")")
    )


def _list_choice_reasons(found: Found, batch: ScriptBatch, reader: str | None) -> Iterator[str]:
    """Say for which batch the layout was chosen, why, and which are the next two."""
    from hf_parallel.planner.advice import list_reasons
    from hf_parallel.planner.report import format_batch_lines

    logits = "" if reader is None else f", whole logits ({reader})"
    yield f"{batch.rows} x {batch.accumulation} rows of {batch.seq} tokens per data rank, {batch.precision}{logits}"
    lines = []
    for choice in found.choices:
        spec, rows = choice.config.to_spec(), choice.rows * choice.accumulation * choice.config.data_parallel_size
        seconds = choice.prediction.step_time_s
        lines.append(f"{spec}: {seconds:.3g} s per step of {rows} rows, {choice.needed_gib:.1f} GiB")
    yield lines[0]
    yield from list_reasons(found.goal, found.choices[0])
    yield from format_batch_lines(found)
    yield from found.suggestions
    yield from (f"then {line}" for line in lines[1:])


def plan(
    model: PreTrainedModel,
    *,
    gpu: str = "h100-80gb",
    gpus: int = 8,
    gpus_per_node: int = 8,
    network: str | None = None,
    seq: int = 4096,
    global_batch: int = 256,
    **options: Any,
) -> Found:
    """Search the layouts that a run accepts, on GPUs of the catalogue; `options` are those of `search`."""
    from hf_parallel.planner.hardware import make_cluster
    from hf_parallel.planner.search import search

    cluster = make_cluster(gpu, gpus, gpus_per_node, network)
    known = make_engine_options(model, options.get("lora", 0), options.get("four_bit", False))
    return search(model=model, cluster=cluster, seq=seq, global_batch=global_batch, **known | options)


def make_engine_options(model: object, lora: int, four_bit: bool | BitsAndBytesConfig | None) -> dict[str, Any]:
    """Return what `search` asks of this engine: the layouts that it accepts for a model, and what its adapters keep.

    It knows neither for a model given as plain numbers, and only formulas for adapters without PEFT.

    Args:
        lora: rank of adapters; 0: none.
        four_bit: whether the base is packed, or how.
    """
    from importlib.util import find_spec

    from hf_parallel.hooks.bitsandbytes import Pack
    from hf_parallel.hooks.peft.planned_adapters import plan_four_bit, plan_lora

    adapt = plan_lora(16 if lora is True else lora) if lora and find_spec("peft") is not None else None
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type"):
        return {"accept": None, "adapt": None}
    pack = None if not four_bit else plan_four_bit() if four_bit is True else Pack(four_bit)
    return {"accept": make_acceptance_test(config, pack), "adapt": adapt}


def make_acceptance_test(config: PretrainedConfig, pack: Packing | None = None) -> Callable[[ParallelConfig], bool]:
    """Return a test whether the engine takes a layout for this model, on a copy on the meta device, as `doctor` does.

    Args:
        pack: packs the base in 4 bits, which some layouts cannot take: `plan_four_bit()`.
    """
    from hf_parallel.model.anatomy import build_on_meta
    from hf_parallel.plans import examine
    from hf_parallel.plans.resolve import draft_plan, read_model

    model = build_on_meta(config)
    known: dict[ParallelConfig, bool] = {}

    def accept(layout: ParallelConfig) -> bool:
        alone = ParallelConfig(dp_shard_size=1, tp_size=layout.tp_size)
        if layout.tp_size > 1 and layout.pp_size > 1 and not accept(alone):
            return False  # cutting many stages takes seconds
        # Of few data ranks: more make no difference to a model, nor do shares.
        inner = layout.cp_size * layout.tp_size
        data, few = min(max(2, layout.ep_size // inner), layout.data_parallel_size), f"@0-{inner - 1}"
        recompute = layout.recompute_way + few * (layout.recompute_ranks is not None)
        offload = layout.offload if layout.offload_ranks is None else layout.offload_way + few
        if offload_folder(offload) == FOLDER_TO_NAME:  # a start wants a folder that can be written to
            offload = offload.replace(FOLDER_TO_NAME, tempfile.gettempdir())
        sizes: dict[str, Any] = {"dp_replicate_size": 1, "dp_shard_size": data, "batch_shares": "even"}
        small = dataclasses.replace(layout, **sizes, activation_checkpointing=recompute, offload=offload)
        if small not in known:  # the plan is asked first, then what packs, as by a start
            starts = not examine(model, small, small.world_size).problems
            if starts and pack is not None:
                resolved = small.resolve(small.world_size)
                try:
                    pack.check(model, draft_plan(resolved, read_model(model, resolved)))
                except SpecError:
                    starts = False
            known[small] = starts
        return known[small]

    return accept


class ScriptBatch(NamedTuple):
    """The batch of a script in the planner's names. `lora`: the adapters' rank; `documents`: rows hold several."""

    rows: int
    accumulation: int
    seq: int
    precision: str
    optimizer: str
    lora: int
    documents: bool


def read_script_batch(
    config: PretrainedConfig | None,
    argv: list[str] | None = None,
    dtype: torch.dtype | str | None = None,
    lowered: str | None = None,
) -> ScriptBatch:
    """Read rows, calls, tokens per row, precision, … of the script from its arguments, else its command line."""
    from hf_parallel.planner.layout import name_optimizer_of, name_precision_of

    argv = sys.argv if argv is None else argv
    arguments = of_session(_Shown).arguments

    def said(name: str, default: object) -> Any:
        value = getattr(arguments, name, None)
        return _read_option(argv, name, default) if value is None else value

    def is_on(name: str) -> bool:
        return str(said(name, False)).lower() == "true"

    # The rank of adapters, by the names that TRL and most scripts have for it; 0: all weights are trained.
    asked = {str(_read_option(argv, name, None)).lower() for name in ("use_peft", "use_lora")}
    sizes = (_read_option(argv, name, None) for name in ("lora_r", "lora_rank"))
    found = next((int(size) for size in sizes if size is not None and size.isdigit()), 0)
    rank = 0 if "false" in asked else found or _DEFAULT_RANK * ("true" in asked)
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST_ASSUMED
    lengths = [int(value) for value in (said(name, None) for name in _LENGTHS) if value]
    if lowered is None:
        lowered = next((name for name in ("bf16", "fp16") if is_on(name)), "no")
    return ScriptBatch(
        rows=int(said("per_device_train_batch_size", 8)),
        accumulation=int(said("gradient_accumulation_steps", 1)),
        seq=min(lengths[0] if lengths else _LONGEST_ASSUMED, longest),
        precision=name_precision_of(dtype or getattr(config, "dtype", None), lowered),
        optimizer=name_optimizer_of(str(said("optim", "adamw"))),
        lora=int(getattr(of_session(_Shown).adapter, "r", 0) or 0) or rank,
        documents=is_on("padding_free") or (is_on("packing") and said("packing_strategy", "bfd") != "wrapped"),
    )


def _read_option(argv: list[str], name: str, default: T) -> str | T:
    """Return the value of `--name value` or `--name=value`; True for a flag without a value."""
    for i, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if key.lstrip("-").replace("-", "_") == name and key.startswith("--"):
            following = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("--") else "true"
            return value if equals else following
    return default
