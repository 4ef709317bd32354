"""TRL's experimental trainers: each that does not work is refused by the name that it is imported by.

So is one that TRL adds tomorrow. Those that work are in `parity/test_trl_experimental.py`.
"""

import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer, TrainingArguments

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.hooks import runtime
from hf_parallel.hooks.trl import trainers

pytest.importorskip("trl", minversion="1.0")  # before it the modules need packages such as mergekit
experimental = pytest.importorskip("trl.experimental")


def classes() -> list[tuple[str, type[Trainer]]]:
    """Every trainer of every module that can be imported here."""
    found = {}
    for module in pkgutil.iter_modules(experimental.__path__):
        try:
            names = vars(importlib.import_module(f"trl.experimental.{module.name}")).values()
        except ImportError:  # of a package that is not installed
            continue
        for kind in names:
            if inspect.isclass(kind) and issubclass(kind, Trainer) and kind.__module__.startswith("trl.experimental"):
                found[f"trl.experimental.{module.name}.{kind.__name__}"] = kind
    return list(found.items())


WORKING = {
    "cpo.CPO",
    "orpo.ORPO",
    "tpo.TPO",
    "gkd.GKD",
    "gmpo.GMPO",
    "gold.GOLD",
    "iw_opd.IWOPD",
    "online_dpo.OnlineDPO",
    "sdft.SDFT",
    "sdpo.SDPO",
}


def test_each_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "mesh", lambda: SimpleNamespace(config=ParallelConfig.parse("tp=2"), data_size=1))
    working = {f"trl.experimental.{name}Trainer" for name in WORKING}
    others, arguments = dict(classes()), TrainingArguments(str(tmp_path))
    assert others.keys() >= working
    AcceleratorState._reset_state(reset_partial_state=True)  # which the arguments have made
    for name, kind in ((name, kind) for name, kind in others.items() if name not in working):
        trainer = kind.__new__(kind)
        with pytest.raises(SpecError, match=rf"{name}: not known.*trl sft.*work"):
            trainers.check_trl_trainer(trainer, arguments, None)
    assert not PartialState._shared_state
