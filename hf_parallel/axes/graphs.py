"""The graphs of compiled layers: how their products communicate, and what of them the backward pass runs again.

Under `tp_overlap=true` a product and its collective become one operation over symmetric memory. torch's inductor fuses
an all-gather with the products that read it, and a product with the reduce-scatter of its result, where both lie side
by side in two dims. Parts of a sequence are consecutive here (`ranks/differentiable.py`): as [tokens, features] each
collective is one along dim 0, and the reshapes around it are written away:

    part [b, s / n, h] -> gather -> [n, b, s / n, h] -> view [b, s, h] -> view [b s, h] -> product
    part [b s / n, h]  -> gather -> [b s, h] -> product

What stays a collective: the gather of an input for its weights' gradients, as second factor of a product.

Under `activation_checkpointing=selective` torch's compiler has forward and backward of a layer as one joint graph, and
cuts it in two where least is kept. What the policy of `recompute.py` keeps may not run again, and all else has to. No
checkpoint stands around the graph.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from hf_parallel.axes import recompute
from hf_parallel.ranks.messages import gather_objects

_ATEN, _C10D = torch.ops.aten, torch.ops._c10d_functional
#: What leaves the order of the elements of a contiguous tensor alone.
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)


def share_memory(group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
    """Let the ranks of a group reach each other's memory: at start, and before layers are compiled. Collective.

    Raises:
        NotImplementedError: on every rank, where one cannot.
    """
    name, reason = group.group_name, None
    try:
        if not symmetric.is_symm_mem_enabled_for_group(name):
            with warnings.catch_warnings():  # called deprecated, and read by inductor's pass
                warnings.simplefilter("ignore", FutureWarning)
                symmetric.enable_symm_mem_for_group(name)
            symmetric.get_symm_mem_workspace(name, min_size=1)
    except Exception as error:  # of the driver, the store or torch: the others wait for this rank's answer
        reason = str(error).partition("\n")[0]
    reasons = [one for one in gather_objects(reason, everyone) if one is not None]
    if reasons:
        raise NotImplementedError(
            f"hf_parallel: tp_overlap=true with compile=regional: {reasons[0]}; tp_overlap=false works"
        )


class FuseProducts(CustomGraphPass):
    """A pass over the graph of a forward or a backward pass, at the end of inductor's own."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        gathers = list(graph.find_nodes(op="call_function", target=torch.ops.hf_parallel.all_gather.default))
        scatters = list(graph.find_nodes(op="call_function", target=torch.ops.hf_parallel.reduce_scatter.default))
        for node in gathers:
            flatten_gather(node)
        for node in scatters:
            flatten_scatter(node)
        graph.eliminate_dead_code()
        micro_pipeline_tp_pass(graph)

    def uuid(self) -> bytes:
        """Return what inductor's cache of graphs knows this pass by: its code."""
        return get_hash_for_files((__file__,))


def flatten_gather(node: fx.Node) -> None:
    """Write a gather […, h] -> [n, …, h] as one of [tokens, h] -> [n tokens, h], which products read at once."""
    part, group, size = node.args
    assert isinstance(part, fx.Node)
    features = part.meta["val"].shape[-1]
    with node.graph.inserting_before(node):
        rows = _add_call(_ATEN.reshape.default, part, [-1, features])
        sent = _add_call(_C10D.all_gather_into_tensor.default, rows, size, group)
        whole = _add_call(_C10D.wait_tensor.default, sent)
        result = _add_call(_ATEN.reshape.default, whole, [size, *_list_sizes(part)])
    node.replace_all_uses_with(result)
    views = [result]
    for view in views:  # grows
        views += [user for user in view.users if user.target in _VIEWS]
        if view.meta["val"].dim() == 2 and view.meta["val"].shape[-1] == features:
            view.replace_all_uses_with(whole)
    for product in list(whole.users):
        if product.target is _ATEN.addmm.default and product.args[1] is whole and not product.kwargs:
            with node.graph.inserting_before(product):  # a bias is no part of a fused product
                plain = _add_call(_ATEN.mm.default, *product.args[1:])
                product.replace_all_uses_with(_add_call(_ATEN.add.Tensor, plain, product.args[0]))


def flatten_scatter(node: fx.Node) -> None:
    """Write a reduce-scatter [n, …, h] -> […, h] as one of a product [n tokens, h], if products made its input.

    The gradient of an input that several layers read is their sum: Σ gᵢ Wᵢ = [g₁ g₂ …] [W₁; W₂; …].
    """
    parts, group = node.args
    assert isinstance(parts, fx.Node)
    size, *_, features = parts.meta["val"].shape
    with node.graph.inserting_before(node):
        factors = _list_factors(parts, features)
        if factors is None:
            rows = _add_call(_ATEN.reshape.default, parts, [-1, features])
        elif len(factors) == 1:
            rows = _add_call(_ATEN.mm.default, *factors[0])
        else:
            left, right = (list(side) for side in zip(*factors, strict=True))
            joined = _add_call(_ATEN.cat.default, left, 1), _add_call(_ATEN.cat.default, right, 0)
            rows = _add_call(_ATEN.mm.default, *joined)
        sent = _add_call(_C10D.reduce_scatter_tensor.default, rows, "sum", size, group)
        own = _add_call(_C10D.wait_tensor.default, sent)
        node.replace_all_uses_with(_add_call(_ATEN.reshape.default, own, _list_sizes(parts)[1:]))


def _list_factors(node: fx.Node, features: int) -> list[tuple[fx.Node, fx.Node]] | None:
    """Return the factors of the products whose sum, of nothing else and for nobody else, a tensor is."""
    if len(node.users) != 1:
        return None
    if node.target in _VIEWS:
        return _list_factors(node.all_input_nodes[0], features)
    if node.kwargs or node.meta["val"].shape[-1] != features:
        return None
    if node.target is _ATEN.mm.default:
        return [cast(tuple[fx.Node, fx.Node], node.args)]
    terms = list(node.args[:2] if node.target is _ATEN.add.Tensor else node.args[:1])
    if node.target not in (_ATEN.add.Tensor, _ATEN.addmm.default):
        return None
    found = [] if node.target is _ATEN.add.Tensor else [cast(tuple[fx.Node, fx.Node], node.args[1:])]
    whole = node.meta["val"]
    for term in terms:
        own = term.meta["val"] if isinstance(term, fx.Node) else None
        if own is None or own.dtype != whole.dtype or own.numel() != whole.numel():  # such as a bias
            return None
        more = _list_factors(cast(fx.Node, term), features)
        if more is None:
            return None
        found += more
    return found


def _add_call(operation: torch._ops.OpOverload, *args: Any) -> fx.Node:
    """Add a call where the graph grows, with the shape of its result."""
    some = args[0][0] if isinstance(args[0], list) else args[0]
    node = some.graph.call_function(operation, args)
    given = fx.node.map_arg(args, lambda one: one.meta["val"])
    node.meta["val"] = operation(*given)
    return node


def _list_sizes(node: fx.Node) -> list[int | fx.Node]:
    """Return the sizes of a tensor; one that differs from call to call is a node."""
    sizes = enumerate(node.meta["val"].shape)
    return [size if isinstance(size, int) else _add_call(_ATEN.sym_size.int, node, dim) for dim, size in sizes]


# ---- What runs again in the backward pass ---------------------------------------------------------------------------

#: Sums over ranks; gathers along the sequence, whose whole results no rank should keep, run again.
_SENT = ("hf_parallel::all_reduce", "hf_parallel::reduce_scatter")


def keep_products(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of torch.compile whose backend cuts joint graphs by `KeepProducts`."""
    backend = settings["backend"]
    if backend == "aot_eager":
        cut = {"partition_fn": KeepProducts(), "keep_inference_input_mutations": True}
        return {**settings, "backend": aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, **cut)}
    if backend != "inductor":
        raise NotImplementedError(
            f"hf_parallel: activation_checkpointing=selective: the compiler {backend} cuts graphs by itself; "
            "activation_checkpointing=full works"
        )
    options = dict(settings.get("options") or {})
    if settings.get("mode") is not None:  # torch.compile takes one of both
        options = {**torch._inductor.list_mode_options(settings["mode"], settings.get("dynamic")), **options}
    return {**settings, "mode": None, "options": {**options, "custom_partitioner_fn": KeepProducts()}}


class KeepProducts(CustomPartitionerFn):
    """A partitioner of joint graphs: products, attention and what ranks send are kept, the rest runs again."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of the forward and the backward pass."""
        results: Any
        (results,) = gm.graph.output_node().args
        forward: set[fx.Node] = set()
        waiting = [node for node in results[: kwargs["num_fwd_outputs"]] if isinstance(node, fx.Node)]
        while waiting:
            node = waiting.pop()
            if node not in forward:
                forward.add(node)
                waiting += node.all_input_nodes
        for node in forward:  # mark its output as kept, or as computed again
            operation = node.target
            if node.op != "call_function" or not isinstance(operation, torch._ops.OpOverload):
                continue
            given: Any
            named: Any
            given, named = map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
            kept = operation.name() in _SENT or torch.Tag.nondeterministic_seeded in operation.tags
            kept = kept or recompute.is_kept(operation, given, named)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
        return min_cut_rematerialization_partition(gm, joint_inputs, **{"compiler": "inductor", **kwargs})

    def uuid(self) -> bytes:
        """Return what inductor's cache of graphs knows this partitioner by: its code."""
        return get_hash_for_files((__file__, str(Path(recompute.__file__))))
