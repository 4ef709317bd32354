"""A process that is proved: its small sizes, what it writes down, how many data ranks it is, and how it rounds."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.prove.record import Record, Step, TokenWatch, sample_gradients, sample_weights

#: The step after which a run that is to be resumed is saved and left: in the middle of an epoch of three.
SAVED_AFTER = 2
#: Gradient accumulation steps and examples per device that a proof takes at most.
ACCUMULATION, EXAMPLES = 2, 4


@dataclass
class Sizes:
    """The sizes of a small run, in which one process stands for all data ranks.

    Attributes:
        steps: optimizer steps; an epoch has one less, the last of which is ragged.
        data_ranks: of the layout. One process takes as many times the batch of a device.
        micro_batches: what a pipeline needs of examples per device.
        heads: ranks that share the heads of a layer.
        stages: of the pipeline.
        joins: the layout joins the examples of a batch to one row.
        keep_dtype: leave bf16 and fp16 as the script has them; else all is fp32.
    """

    steps: int = 4
    data_ranks: int = 1
    micro_batches: int = 1
    heads: int = 1
    stages: int = 1
    joins: bool = False
    keep_dtype: bool = False

    @classmethod
    def of_layout(
        cls, config: ParallelConfig, steps: int, keep_dtype: bool, other: ParallelConfig | None = None
    ) -> Sizes:
        """Return the sizes that a resolved layout needs, and another one that has begun the run."""
        layouts = [config] if other is None else [config, other]
        data_ranks = max(one.data_parallel_size for one in layouts)
        micro_batches = max(max(one.pipeline_microbatches or 1, one.pp_size) for one in layouts)
        heads = math.lcm(*(one.tp_size * one.cp_size for one in layouts))
        stages = max(one.pipeline_stages for one in layouts)
        joins = any(one.padding_free for one in layouts)
        return cls(steps, data_ranks, micro_batches, heads, stages, joins, keep_dtype)


@dataclass
class Proving:
    """The state of one process that is proved.

    Attributes:
        multiply: how many data ranks this process stands for.
        disturbed: rounding differs on purpose.
        on_gpu: else on a CPU, whatever the script asks for.
        alone: one process, without the layout.
        leaves: the run ends with its first save, and another one resumes it.
        resumes: from this checkpoint.
        models: folder with the small models, which all processes of a proof share.
        out: folder of this run, which takes the place of the script's output folder.
        done: optimizer steps.
        in_trainer: a Trainer trains; Accelerator is its tool.
        driven: the script has a Trainer or an Accelerator, which tell of steps and losses; else its optimizer does.
        made: models that the script has loaded or made.
        draws: the training draws noise in its forward passes, from one state in all processes.
    """

    sizes: Sizes
    record: Record
    out: Path
    models: Path
    multiply: int = 1
    disturbed: bool = False
    on_gpu: bool = False
    alone: bool = False
    leaves: bool = False
    resumes: Path | None = None
    done: int = 0
    in_trainer: bool = False
    driven: bool = False
    draws: bool = False
    watched: list[nn.Module] = field(default_factory=list)
    made: list[nn.Module] = field(default_factory=list)

    # ---- watching --------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return the step that is being computed."""
        return self.record.step(self.done)

    def watch(self, model: nn.Module, precision: str | None = None) -> None:
        """Watch the tokens of a model; disturb its weights if this run is to differ by rounding.

        Args:
            precision: of mixed precision: "bf16", "fp16", or "no".
        """
        if model in self.watched:
            return
        self.watched.append(model)
        self.record.facts.setdefault("model", type(model).__name__)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.record.facts.setdefault("config", hashlib.sha256(config.to_json_string().encode()).hexdigest()[:16])
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        computes_in = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "no", weights)
        self.record.facts.setdefault("computes_in", str(computes_in).removeprefix("torch."))
        if self.disturbed:
            disturb_weights(model, computes_in)
        tokens = TokenWatch(model, self.step, backward=True)
        if self.alone:  # tokens of one process are looked for among all of a layout
            tokens.mark_padding(model)

    def end_step(self, models: Sequence[nn.Module]) -> None:
        """Note the gradients of a step, once: before they are clipped, or as the optimizer is about to read them."""
        if self.step().gradients:
            return
        for model in models:
            self.record.facts.setdefault("device", next(model.parameters()).device.type)
            self.step().gradients.update(sample_gradients(model))

    def note_weights(self, models: Sequence[nn.Module]) -> None:
        """Note the trained weights."""
        for model in models:
            self.record.weights.update(sample_weights(model))

    # ---- sizes -----------------------------------------------------------------------------------------------

    def share_batches(self) -> None:
        """With `split_batches=True` the batch that a script asks for is that of all data ranks: one process's, too."""
        self.sizes, self.multiply = replace(self.sizes, data_ranks=1), 1

    def count_examples(self, per_device: int, accumulation: int) -> int:
        """Count the examples of an epoch: full steps, and a last one with a quarter less."""
        batch = per_device * self.sizes.data_ranks * accumulation
        return batch * (self.sizes.steps - 2) + max(1, batch - max(1, batch // 4))


class Enough(SystemExit):
    """A loop of the script's own has made all steps of the proof."""


# ---- Files of the user stay as they are: a script that is proved writes into the folder of its run ------------------

#: Audit events -> which of their arguments are paths that are written to.
_WRITTEN = {
    **dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"), (0,)),
    **dict.fromkeys(("os.rename", "shutil.move"), (0, 1)),
    **dict.fromkeys(("os.link", "os.symlink"), (1,)),
}
#: Those without the number of a folder that paths are relative to, as the last argument.
_WHOLE = ("os.truncate", "shutil.move")
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse_writes_outside(folder: Path) -> None:
    """From here on writing, renaming or removing files raises an error, but in `folder`, caches and temporary folders.

    It holds as long as the process.
    """
    home = os.path.expanduser("~")
    caches = (os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME"), os.path.join(home, ".cache"))
    roots = (str(folder), tempfile.gettempdir(), "/dev", "/proc", *filter(None, caches))
    allowed = tuple(os.path.realpath(root) + os.sep for root in roots)

    def check(path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        if not (real + os.sep).startswith(allowed) and "__pycache__" not in real:
            refuse(f"prove: {real}", "is the user's, and a proof must not write there", do="save to another folder")

    def audit(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & _FLAGS):
                check(path)
        elif event in _WRITTEN and (event in _WHOLE or arguments[-1] in (None, -1)):  # else of a folder asked about
            for place in _WRITTEN[event]:
                check(arguments[place])

    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        check(filename)
        return original(tensors, filename, *args, **kwargs)

    sys.addaudithook(audit)
    import safetensors.torch as module  # whose writer opens files without Python

    original, module.serialize_file = module.serialize_file, serialize_file


# ---- Rounding on purpose: the tolerance of every comparison comes from a run in one process under both --------------

_aten = torch.ops.aten
#: Units in the last place of the largest sum by which sums in another order differ.
_SUMS_ARE_OFF = 8
_SOFTMAX = {_aten._log_softmax.default, _aten._softmax.default}
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}


class SumsInAnotherOrder(TorchDispatchMode):
    """Compute each matrix product as two sums over halves of the inner dim, forward and backward; norms in thirds.

    Softmaxes sum over two halves as well: over 152,064 classes torch's own on a CPU is off by 2e-4 in fp32. Inputs of
    relu that rounding may move over 0 change their sign, because the gradient is another beyond it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.mm.default, _aten.bmm.default) and _is_plain(*args):
            return _multiply_in_halves(func, *args)
        if func is _aten.addmm.default and not kwargs and _is_plain(*args):
            bias, left, right = args
            return _multiply_in_halves(_aten.mm.default, left, right) + bias
        if func in _SOFTMAX and not kwargs and args[2] is False and _is_plain(args[0]) and args[0].shape[args[1]] > 1:
            first, second = (part.logsumexp(args[1], keepdim=True) for part in args[0].tensor_split(2, args[1]))
            result = args[0] - torch.logaddexp(first, second)
            return result.exp() if func is _aten._softmax.default else result
        if func is _aten.relu.default and _is_plain(*args) and args[0].numel():
            size = args[0].abs()
            is_zero = size <= _SUMS_ARE_OFF * torch.finfo(size.dtype).eps * size.amax()
            return func(torch.where(is_zero, -args[0], args[0]))
        if func in _NORMS and not kwargs and args[1:] in ((), (2,), (2.0,)):
            tensors = args[0] if func is _aten._foreach_norm.Scalar else [args[0]]
            if _is_plain(*tensors):
                parts = ([torch.linalg.vector_norm(part) for part in t.flatten().tensor_split(3)] for t in tensors)
                norms = [torch.linalg.vector_norm(torch.stack(of_parts)) for of_parts in parts]
                return norms if func is _aten._foreach_norm.Scalar else norms[0]
        return func(*args, **kwargs)


def _is_plain(*tensors: Any) -> bool:
    return all(type(tensor) is torch.Tensor and tensor.is_floating_point() for tensor in tensors)


def _multiply_in_halves(product: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    half = left.shape[-1] // 2
    if half == 0:
        return product(left, right)
    return product(left[..., :half], right[..., :half, :]) + product(left[..., half:], right[..., half:, :])


@torch.no_grad()
def disturb_weights(model: nn.Module, computes_in: torch.dtype, seed: int = 1) -> None:
    """Move every weight to the next number of its dtype, up or down at random.

    Args:
        computes_in: the dtype of products; if it is shorter, weights move by half a unit of that, as layouts round
            weights where one process rounds what it computes of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.device.type != "meta":
            up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
            unit = torch.finfo(computes_in).eps / 2
            if unit > torch.finfo(parameter.dtype).eps:
                parameter.mul_(torch.where(up, 1 + unit, 1 - unit))
            else:
                ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                parameter.copy_(torch.nextafter(parameter, ends))
