"""Front ends with loaders or forward passes of their own: ms-swift deals to data ranks, Unsloth is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replace

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
