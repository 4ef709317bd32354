"""`parallel` as a field of TrainingArguments, in every order of imports."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import sys

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.hooks import activation
from hf_parallel.hooks.trainer import flag

SPEC = "dp_shard=-1"


def forked(body):
    """`tests.distributed` imports transformers, which a fresh interpreter must not have done yet."""
    from tests.distributed import run_alone

    return run_alone(body)


class Recorder:
    """Stands in for `activation.activate` and `activation.active`: notes who asked, touches nothing."""

    def __init__(self):
        self.calls = []

    def activate(self, spec, source):
        """Note the call and whether the process group was still to be made."""
        from accelerate import PartialState

        self.calls.append((spec, source, PartialState._shared_state == {}))

    def __enter__(self):
        activation.activate, activation.is_active = self.activate, lambda: bool(self.calls)
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the same on a machine with GPUs
        return self

    def __exit__(self, *error):
        flag.uninstall_flag()


def fresh(body):
    """Run `body` in a forked process where the field is not installed, whatever was imported before."""

    def alone():
        flag.uninstall_flag()
        body()

    forked(alone)


def check_class(cls):
    """Everything a user does with the field, on one class."""
    from transformers import HfArgumentParser

    with_flag = cls("out", parallel=SPEC, report_to=[])
    assert (with_flag.output_dir, with_flag.parallel, with_flag.use_cpu) == ("out", SPEC, True)
    assert cls("out", 3).per_device_train_batch_size == 3
    assert cls("out").parallel is None
    assert "parallel" in inspect.signature(cls).parameters
    for twin in (pickle.loads(pickle.dumps(with_flag)), copy.copy(with_flag), copy.deepcopy(with_flag)):
        assert twin.parallel == SPEC
    assert dataclasses.replace(with_flag, learning_rate=1.0).parallel == SPEC
    assert json.loads(with_flag.to_json_string())["parallel"] == SPEC
    assert cls(**with_flag.to_dict()).to_dict() == with_flag.to_dict()
    assert repr(with_flag).startswith(cls.__qualname__)
    parser = HfArgumentParser(cls)
    assert "--parallel" in parser.format_help()
    assert parser.parse_args_into_dataclasses(["--output_dir", "out", "--parallel", SPEC])[0].parallel == SPEC
    assert parser.parse_args_into_dataclasses(["--output_dir", "out"])[0].parallel is None
    assert parser.parse_dict({"output_dir": "out", "parallel": SPEC})[0].parallel == SPEC


def derive(base):
    """A dataclass as scripts write it, with a field and a `__post_init__` of its own."""

    @dataclasses.dataclass
    class ScriptArguments(base):
        """Defined in a function, so pickling needs the name below."""

        block_size: int = 7

        def __post_init__(self):
            super().__post_init__()
            self.doubled = 2 * self.block_size

    ScriptArguments.__qualname__ = f"Derived{base.__name__}{len(DERIVED)}"
    DERIVED.append(ScriptArguments)
    setattr(sys.modules[__name__], ScriptArguments.__qualname__, ScriptArguments)
    return ScriptArguments


DERIVED = []


def flag_first():
    """For a fresh interpreter: the field first, then transformers, TRL and a derived class."""
    assert "transformers.training_args" not in sys.modules
    with Recorder() as recorder:
        flag.install_on_import()
        assert "transformers.training_args" not in sys.modules
        from transformers import Seq2SeqTrainingArguments, TrainingArguments

        assert flag._waiting not in sys.meta_path
        assert inspect.getsource(TrainingArguments).startswith("@dataclass")
        classes = [TrainingArguments, Seq2SeqTrainingArguments, derive(TrainingArguments), *trl_configs()]
        for cls in classes:
            check_class(cls)
        assert derive(TrainingArguments)("out", block_size=3).doubled == 6
        assert {call[:2] for call in recorder.calls} == {(SPEC, flag.SOURCE)}


def trl_configs():
    """TRL's SFTConfig where TRL is installed."""
    try:
        from trl import SFTConfig
    except ImportError:
        return []
    return [SFTConfig]


def test_flag_after_transformers():
    def body():
        from transformers import Seq2SeqTrainingArguments, TrainingArguments

        early = derive(TrainingArguments)
        twice = derive(early)
        configs = trl_configs()
        made_before = TrainingArguments("out", use_cpu=True)
        with Recorder() as recorder:
            flag.install_on_import()
            flag.install_on_import()
            for cls in (TrainingArguments, Seq2SeqTrainingArguments, early, twice, derive(early), *configs):
                check_class(cls)
            assert twice("out", block_size=3).doubled == 6
            assert made_before.parallel is None
            assert "parallel" in made_before.to_dict()
            assert {call[:2] for call in recorder.calls} == {(SPEC, flag.SOURCE)}

    fresh(body)


def test_activation_comes_before_the_process_group():
    def body():
        from accelerate.state import AcceleratorState
        from transformers import TrainingArguments

        AcceleratorState._reset_state(reset_partial_state=True)
        with Recorder() as recorder:
            flag.install()
            args = TrainingArguments("out", parallel=SPEC)
            assert recorder.calls == [(SPEC, flag.SOURCE, True)]
            assert args.device.type == "cpu"

    fresh(body)


def test_without_a_spec_nothing_is_activated():
    def body():
        from transformers import TrainingArguments

        with Recorder() as recorder:
            flag.install()
            del os.environ["ACCELERATE_USE_CPU"]
            assert TrainingArguments("out").use_cpu is False
            assert recorder.calls == []

    fresh(body)


def test_environment_activates_and_a_config_becomes_a_string():
    def body():
        from transformers import TrainingArguments

        with Recorder() as recorder:
            flag.install()
            os.environ["HF_PARALLEL"] = "tp=2"
            args = TrainingArguments("out", parallel=ParallelConfig(tp_size=2))
            assert [call[:2] for call in recorder.calls] == [
                ("tp=2", "HF_PARALLEL"),
                (ParallelConfig(tp_size=2), flag.SOURCE),
            ]
            assert args.parallel == "tp=2"
            assert TrainingArguments("out", parallel=ParallelConfig()).parallel == SPEC

    fresh(body)


def test_a_class_with_its_own_parallel_keeps_it():
    def body():
        from transformers import TrainingArguments

        def with_own():
            @dataclasses.dataclass
            class Own(TrainingArguments):
                parallel: int = 1

            return Own

        before = with_own()
        with Recorder() as recorder:
            flag.install()
            for cls in (before, with_own()):
                assert cls("out", parallel=4).parallel == 4
            assert recorder.calls == []
        assert before("out").parallel == 1

    fresh(body)


def test_refusal_passes_through():
    def refuse(spec, source):
        raise SpecError("tp=3: no")

    def body():
        from transformers import TrainingArguments

        with Recorder():
            activation.activate = refuse
            flag.install()
            with pytest.raises(SpecError, match="tp=3"):
                TrainingArguments("out", parallel="tp=3")

    fresh(body)


def test_uninstall_restores_everything():
    def body():
        from transformers import HfArgumentParser, TrainingArguments

        early = derive(TrainingArguments)

        def picture():
            classes = [TrainingArguments, early]
            names = ("__init__", "__post_init__", "__annotations__", "parallel")
            parts = [[cls.__dict__.get(name) for name in names] for cls in classes]
            return [*parts, [list(cls.__dataclass_fields__) for cls in classes]]

        before = picture()
        with Recorder():
            flag.install()
            assert picture() != before
            late = derive(TrainingArguments)
            late("out", parallel=SPEC)
        assert picture() == before
        with pytest.raises(TypeError):
            TrainingArguments("out", parallel=SPEC)
        for cls in (TrainingArguments, early, late):
            assert "--parallel " not in HfArgumentParser(cls).format_help()
        with Recorder() as recorder:
            flag.install()
            late("out", parallel=SPEC)
            assert recorder.calls

    fresh(body)


def test_uninstall_withdraws_a_waiting_install():
    def body():
        flag.uninstall_flag()
        module = sys.modules.pop("transformers.training_args", None)
        finders = list(sys.meta_path)
        flag.install_on_import()
        flag.install_on_import()
        assert len(sys.meta_path) == len(finders) + 1
        flag.uninstall_flag()
        assert sys.meta_path == finders
        return module is None

    fresh(body)


def test_one_process_names_the_settings_that_it_leaves_out(capfd):
    """Of layouts of several; what holds on one device, a size, or a spec of sizes alone, needs no line."""
    from hf_parallel.hooks import activation
    from tests.distributed import run_alone

    def told(spec: str) -> str:
        run_alone(activation.activate, spec)
        return capfd.readouterr().err

    assert "trains without zero_stage=2, which need" in told("zero_stage=2,attention=torch_flash")
    assert "one process trains without" not in told("attention=torch_flash,activation_checkpointing=full")
    assert "one process" not in told("dp_shard=-1")
