"""`parallel` as a field of `TrainingArguments`: `--parallel SPEC` for every Trainer script.

The field is added to the class and to everything already derived from it, so the order of imports does not matter;
classes derived later inherit it like any other field. It is keyword-only: positional arguments keep their meaning.
A class that declares a field `parallel` of its own keeps it, untouched.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from hf_parallel.ask.replaced import Replaced
from hf_parallel.ask.session import of_process
from hf_parallel.hooks.after_import import AfterImport
from hf_parallel.hooks.trainer.engines import check_engines

if TYPE_CHECKING:
    from transformers import TrainingArguments

NAME = "parallel"
SOURCE = "TrainingArguments(parallel=…)"
_MODULE = "transformers.training_args"
_HELP = (
    "How to spread the training over the processes: key=value,… such as tp=2,pp=2,dp_shard=-1, or the path of a YAML "
    "file with the same keys."
)
_OF_ALL = ("it has the field `parallel`, which scripts parse, and which activates the layout", "from its import on")
REPLACES = tuple(
    Replaced(f"{_MODULE}:TrainingArguments.{name}", *_OF_ALL)
    for name in (NAME, "__init__", "__post_init__", "__annotations__")
)


@dataclasses.dataclass
class _Installed:
    """The changes that `install` has made; this process keeps them between layouts."""

    undo: list[Callable[[], None]] = dataclasses.field(default_factory=list)


_FLAG = dataclasses.field(default=None, kw_only=True, metadata={"help": _HELP})
FIELD: dataclasses.Field[object] = dataclasses.fields(
    dataclasses.make_dataclass("Flag", [(NAME, str | None, _FLAG)])  # type: ignore[list-item]
)[0]


def install_on_import() -> None:
    """Install now if `transformers.training_args` is imported, else right after its import. Imports nothing itself."""
    if hasattr(sys.modules.get(_MODULE), "TrainingArguments"):
        install()
    elif not of_process(_Installed).undo and _waiting not in sys.meta_path:
        _waiting.wait()


def install() -> None:
    """Give `TrainingArguments` and all its present subclasses the field. A second call changes nothing."""
    if of_process(_Installed).undo:
        return
    from transformers.training_args import TrainingArguments

    family = list(_iterate_family(TrainingArguments))
    adopters = [cls for cls in family if cls.__dataclass_fields__.get(NAME, FIELD) is FIELD and not hasattr(cls, NAME)]
    for cls in adopters:
        if "__dataclass_fields__" in cls.__dict__:  # a plain subclass reads its parent's
            cls.__dataclass_fields__[NAME] = FIELD
        if "__init__" in cls.__dict__:
            _set_on_class(cls, "__init__", _accept_parallel(cls.__init__))
    _set_on_class(TrainingArguments, NAME, FIELD.default)  # also seen by instances that were made, or pickled, before
    own = TrainingArguments.__annotations__  # from Python 3.14 on they stand in the class under another name
    of_process(_Installed).undo.append(lambda: setattr(TrainingArguments, "__annotations__", own))
    TrainingArguments.__annotations__ = {**own, NAME: str | None}
    _set_on_class(TrainingArguments, "__post_init__", _activate_before(TrainingArguments.__post_init__))


_waiting = AfterImport(_MODULE, install)


def uninstall_flag() -> None:
    """Take everything back, for classes derived in between too (their `__init__` goes on accepting the keyword)."""
    _waiting.leave()
    undo = of_process(_Installed).undo
    if not undo:
        return
    from transformers.training_args import TrainingArguments

    for cls in _iterate_family(TrainingArguments):
        fields = cls.__dict__.get("__dataclass_fields__", {})
        if fields.get(NAME) is FIELD:
            del fields[NAME]
    while undo:
        undo.pop()()


def _iterate_family(cls: type[TrainingArguments]) -> Iterator[type[TrainingArguments]]:
    """`cls` and its subclasses, each once, parents first."""
    seen, waiting = {cls}, [cls]
    while waiting:
        parent = waiting.pop(0)
        yield parent
        new = [child for child in parent.__subclasses__() if child not in seen]
        seen.update(new)
        waiting.extend(new)


def _set_on_class(cls: type, name: str, value: object) -> None:
    missing = object()
    before = cls.__dict__.get(name, missing)
    undo = of_process(_Installed).undo
    undo.append(lambda: delattr(cls, name) if before is missing else setattr(cls, name, before))
    setattr(cls, name, value)


def _accept_parallel(init: Callable[..., None]) -> Callable[..., None]:
    """`init` with the keyword `parallel`, stored before the rest runs because `__post_init__` reads it."""
    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())
    if NAME in signature.parameters or parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return init  # made after an earlier install, or handing its keywords on

    @functools.wraps(init)
    def __init__(self: TrainingArguments, *args: object, parallel: object = None, **kwargs: object) -> None:
        if parallel is not None or NAME not in self.__dict__:  # an outer __init__ may have set it already
            self.parallel = parallel
        init(self, *args, **kwargs)

    keyword = inspect.Parameter(NAME, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    __init__.__signature__ = signature.replace(parameters=[*parameters, keyword])  # type: ignore[attr-defined]
    return __init__


def _activate_before(post_init: Callable[[TrainingArguments], None]) -> Callable[[TrainingArguments], None]:
    """`post_init` with the plugin activated first: the original picks the devices and starts the process group."""

    @functools.wraps(post_init)
    def __post_init__(self: TrainingArguments) -> None:
        from hf_parallel.hooks import activation, auto

        from_environment = os.environ.get("HF_PARALLEL")
        flag = self.parallel if self.__dataclass_fields__.get(NAME) is FIELD else None
        if from_environment and not activation.is_expected():
            if flag:  # told now: once processes connect, one that refuses would tear down another that still does
                activation.check_agreement(SOURCE, flag, "HF_PARALLEL", from_environment)
            activation.activate(from_environment, source="HF_PARALLEL")
        if flag:
            activation.activate(self.parallel, source=SOURCE)
            if not isinstance(self.parallel, str):  # a ParallelConfig: the arguments must stay JSON
                self.parallel = self.parallel.to_spec() or "dp_shard=-1"  # all defaults spell as nothing
        if not activation.is_expected():
            activation.read_checkpoints()
        else:
            check_engines(self)  # before the original asks for a DeepSpeed that may not be installed
            import torch

            on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
            known = not on_cpu and torch.accelerator.is_available()
            device = torch.accelerator.current_accelerator() if known else None
            if device is None or device.type == "mps":  # `mps` cannot hold more than one process
                self.use_cpu = True  # else accelerate starts a single-process state on a machine without GPUs
        post_init(self)
        if activation.is_active():
            from hf_parallel.hooks import runtime

            # Apply `ddp_timeout` to existing groups. Its default leaves the environment's value.
            default = type(self).__dataclass_fields__["ddp_timeout"].default
            if self.ddp_timeout != default or not os.environ.get(runtime.TIME_OUT):
                runtime.change_time_out(timedelta(seconds=self.ddp_timeout))
        auto.remember_arguments(self)

    return __post_init__
