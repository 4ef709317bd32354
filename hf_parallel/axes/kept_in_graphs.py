"""`activation_checkpointing=selective` of compiled layers: which operations of a graph run again in the backward pass.

torch's compiler has forward and backward of a layer as one joint graph, and cuts it in two where least is kept. Here
what the policy of `recompute.py` keeps may not run again, and all else has to. No checkpoint stands around the graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from hf_parallel.axes import recompute

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
