"""Front ends with loaders or forward passes of their own, and torchmetrics.

ms-swift deals to data ranks, metrics are gathered over them, and Unsloth and Opacus are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DEALS = "deals to all processes, and so other sequences to ranks of one model"


@replace("swift.dataloader.shard:BatchSamplerShard.rank", _DEALS)
def deal_by_data_rank(original: property) -> property:
    """Return a property with the number of the data rank."""
    return property(lambda sampler: runtime.mesh().data_rank)


@replace("swift.dataloader.shard:BatchSamplerShard.world_size", _DEALS)
def deal_to_data_ranks(original: property) -> property:
    """Return a property with the number of data ranks."""
    return property(lambda sampler: runtime.mesh().data_size)


@replace("swift.dataloader.dispatcher:DataLoaderDispatcher.group", _DEALS)
def send_to_data_ranks(original: property) -> property:
    """Return a property with the group of the data ranks; the first of each group reads a streamed data set."""
    return property(lambda loader: runtime.mesh().data_group)


@patch(
    "unsloth.models.loader:{FastLanguageModel,FastModel}.from_pretrained",
    "makes forward passes and steps of Trainer that no layout can split",
)
def refuse_unsloth(original: Callable, *args: object, **kwargs: object) -> NoReturn:
    """Refuse a model of Unsloth, and name what trains in its place."""
    why = "Unsloth replaces forward passes and steps of Trainer that a layout has to split"
    do = "AutoModelForCausalLM.from_pretrained and PEFT's get_peft_model work, in a script without `import unsloth`"
    refuse("FastLanguageModel", why, do=do)


@patch("opacus.privacy_engine:PrivacyEngine.make_private", "keeps a gradient of each example, by hooks of each module")
def refuse_private_gradients(original: Callable, self: Any, *args: Any, **kwargs: Any) -> object:
    """Refuse to clip the gradients of single examples of a parallel model: ranks hold parts of them."""
    model = kwargs.get("module", args[0] if args else None)
    if model is not None and any(runtime.find_parallel_state(part) is not None for part in model.modules()):
        why = "Opacus keeps the gradient of each example by hooks of modules, which a layout splits"
        refuse("PrivacyEngine.make_private", why, do="one process works, or Opacus with a model that is not parallel")
    return original(self, *args, **kwargs)


@patch("torchmetrics.metric:Metric.sync", "gathers over all processes, and so twice what ranks of one model share")
def sync_over_data_ranks(
    original: Callable,
    self: Any,
    dist_sync_fn: Callable | None = None,
    process_group: ProcessGroup | None = None,
    should_sync: bool = True,
    distributed_available: Callable | None = None,
) -> None:
    """Gather over the data ranks, unless the metric has a group of its own."""
    if process_group is None and self.process_group is None:
        process_group, should_sync = runtime.mesh().data_group, should_sync and runtime.mesh().data_size > 1
    original(self, dist_sync_fn, process_group, should_sync, distributed_available)
