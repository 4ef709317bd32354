"""Towers of images, films or sounds, which a data rank whose batch has none does not call.

Under FSDP2 all data ranks gather a layer's weights and reduce its gradients together: ranks that leave the tower out
and ranks that call it would wait for each other. They tell each other what their batches hold, one number per kind of
media in one all-gather before the model's forward, over host memory: no GPU is waited for. Only where they differ, the
first rank that has such media lends them to those without any, which call the tower too and add its features, times
zero, to what the words are read as:

    rank 0    words, images    embedding ── tower, projector ── language model
    rank 1    words            embedding ── tower, projector (rank 0's images) · 0 ── language model

Each tower then has a gradient on all ranks or on none, as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_parallel.model.calls import CACHES, bind_by_name
from hf_parallel.ranks import all_reduce
from hf_parallel.ranks.local import put_in_front
from hf_parallel.ranks.mesh import ParallelMesh

#: Methods of models that make features of media, and modules that read these among the embeddings of words.
_METHODS = ("get_image_features", "get_video_features", "get_audio_features")
_READERS = ("language_model", "text_model")
#: Models that embed words after they have made features, as read in their forward.
_FEATURES_FIRST = {"GlmImageModel"}
#: What a model's forward calls media, where it has none of the methods.
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
#: What of a method's output a forward goes on with: of the rest some models give no gradient to the last layers.
_USED = ("pooler_output", "deepstack_features")


def share_towers(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on data ranks call the same towers in each forward of the model. Its units are sharded already."""
    if dist.get_backend() == "fake":  # a dry run, whose other ranks are not there
        return
    owners = [module for module in model.modules() if _find_reader_and_methods(module)[1]]
    if owners:
        for owner in owners:
            SharedTowers(owner, mesh)
        return
    modalities = getattr(model, "input_modalities", "text")
    reads_media = not isinstance(modalities, str) and {"text"} < set(modalities)
    always, taken = getattr(model, "main_input_name", None) in _MEDIA, inspect.signature(model.forward).parameters
    # Gemma3ForCausalLM says that it reads images, and takes none.
    if reads_media and "labels" in taken and not always and not {*_MEDIA}.isdisjoint(taken):
        SharedTowers(model, mesh)


def _find_reader_and_methods(module: nn.Module) -> tuple[nn.Module | None, dict[str, str]]:
    """Return the language model that is a child of this module, and which methods make features of media.

    Returns:
        The language model, if there is one, and beside it, by method, the argument that holds the media. There is
        none in models that always read both, such as CLIP.
    """
    children = () if type(module).__name__ in _FEATURES_FIRST else module.named_children()
    reader = next((child for name, child in children if name in _READERS), None)
    if reader is None:
        return None, {}
    taken = inspect.signature(module.forward).parameters
    methods = [name for name in _METHODS if hasattr(module, name) and "inputs_embeds" in taken]
    found = {name: next(iter(inspect.signature(getattr(module, name)).parameters), "") for name in methods}
    return reader, {name: first for name, first in found.items() if first in taken}


class SharedTowers:
    """Hooks of one model that reads words and media."""

    def __init__(self, owner: nn.Module, mesh: ParallelMesh) -> None:
        self.owner, self.mesh, self.group = owner, mesh, mesh.data_group_on_host()
        self.reader, self.methods = _find_reader_and_methods(owner)
        self.media = list(self.methods.values()) or [
            name for name in _MEDIA if name in inspect.signature(owner.forward).parameters
        ]
        self.lent: list[tuple[str, dict[str, Any]]] = []
        owner.register_forward_pre_hook(self._agree, with_kwargs=True, prepend=True)
        if self.reader is not None:
            self.reader.register_forward_pre_hook(self._call_lent, with_kwargs=True, prepend=True)

    def _agree(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Find out which media only some data ranks have, and borrow those that this one lacks."""
        given = bind_by_name(owner.forward, args, kwargs)
        self.lent = []
        past: Any = next((given[name] for name in CACHES if given.get(name) is not None), None)
        if hasattr(past, "get_seq_length") and past.get_seq_length() > 0:
            return  # a model that generates reads media in its first step alone
        if not torch.is_grad_enabled() and self.mesh.config.dp_shard_size == 1:
            return  # in evaluation only ranks that share weights make this forward together
        own = torch.tensor([given.get(name) is not None for name in self.media]).int()
        everywhere = [torch.empty_like(own) for _ in range(self.mesh.data_size)]
        dist.all_gather(everywhere, own, group=self.group)
        held = torch.stack(everywhere).bool().tolist()
        for place, name in enumerate(self.media):
            ranks = [rank for rank, kinds in enumerate(held) if kinds[place]]
            if len(ranks) in (0, self.mesh.data_size):
                continue
            source = ranks[0]
            if not self.methods:
                config = self.mesh.config
                key = "dp_shard_size" if config.dp_shard_size > 1 else "dp_replicate_size"
                asked, kind = f"{key}={getattr(config, key)}", type(owner).__name__
                raise NotImplementedError(
                    f"hf_parallel: {asked}: {kind}: the batch of data rank {source} has {name}, and that of another "
                    f"one has none and gathers no tower; {key}=1 works"
                )
            method = list(self.methods)[place]
            told: list[Any] = [None]
            if self.mesh.data_rank == source:
                taken = inspect.signature(getattr(owner, method)).parameters
                told = [{key: _move_value(given[key], "cpu") for key in taken if given.get(key) is not None}]
            dist.broadcast_object_list(told, group=self.mesh.data_group, group_src=source)
            if given.get(name) is None:
                media = {key: _move_value(value, self.mesh.device) for key, value in told[0].items()}
                self.lent.append((method, media))

    def _call_lent(self, reader: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Call the towers with what other ranks have lent, where the owner would call them."""
        if not self.lent:
            return None
        embeddings = cast(torch.Tensor, kwargs["inputs_embeds"])
        for method, media in self.lent:
            features = getattr(self.owner, method)(**media)
            if isinstance(features, Mapping):
                features = [features[key] for key in _USED if features.get(key) is not None]
            for tensor in tree_leaves(features):
                if torch.is_tensor(tensor) and tensor.is_floating_point():
                    embeddings = embeddings + (tensor * 0).sum().to(embeddings.dtype)
        self.lent = []
        return args, {**kwargs, "inputs_embeds": embeddings}


def _move_value(value: Any, device: torch.device | str) -> Any:
    return tree_map(lambda part: part.detach().to(device) if torch.is_tensor(part) else part, value)


# ---- Experts in lists of modules, of which each data rank calls those that its own tokens have chosen
# What no token of a rank has chosen has no gradient there, and FSDP2 reduces only the gradients that a rank has: ranks
# with other ones would wait for each other, or add up what does not belong together. In the forward pass ranks tell
# each other which modules they have called, one number per module in one all-reduce; what another rank has called is
# called here with no tokens, for a gradient of zeros. What no rank has called has no gradient, as in one process.


def share_choices(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on lists of modules with a forward of their own call what any rank with other tokens has called."""
    groups = [mesh.data_group] if mesh.data_size > 1 else []
    if mesh.size("cp") > 1:
        groups.append(mesh["cp"].get_group())
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            own = (base for base in type(module).__mro__ if not base.__module__.startswith("torch."))
            if any("forward" in vars(base) for base in own):
                put_in_front(SharedChoices, module).follow(groups)


class SharedChoices(nn.Module):
    """[…, features], this rank's tokens, and what says where they go -> […, features]."""

    groups: list[dist.ProcessGroup]
    called: set[nn.Module]

    def follow(self, groups: list[dist.ProcessGroup]) -> None:
        """Note which modules of the list are called."""
        self.groups, self.called = groups, set()
        for module in self.modules_of_list():
            module.register_forward_pre_hook(lambda module, args: self.called.add(module))

    def modules_of_list(self) -> list[nn.Module]:
        """Return the modules that have weights, in one order on all ranks."""
        return [module for module in self.children() if any(True for _ in module.parameters())]

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.called.clear()
        output = super().forward(tokens, *args, **kwargs)
        if not (torch.is_grad_enabled() and torch.is_tensor(output)):  # layers by name give a dictionary of their maps
            return output
        modules = self.modules_of_list()
        called = torch.tensor([module in self.called for module in modules], dtype=torch.int32, device=output.device)
        elsewhere = called
        for group in self.groups:
            elsewhere = all_reduce(elsewhere, group, dist.ReduceOp.MAX)
        for index in (elsewhere > called).nonzero().flatten().tolist():
            output = output + modules[index](tokens.new_zeros(0, tokens.shape[-1])).sum().to(output.dtype)
        return output
