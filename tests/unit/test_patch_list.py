"""docs/reference/patches.md lists the patches that there are."""

import inspect
import sys
from types import ModuleType

import accelerate.utils  # whose names are looked at
import transformers.loss.loss_for_object_detection
import transformers.trainer_seq2seq

from hf_parallel.hooks.patching import find_names_of
from tests import patch_list

#: Replaced in one module on purpose: what others do by the same function is as it was.
OF_ONE_MODULE = {
    "transformers.trainer:apply_liger_kernel",
    "transformers.trainer:is_fsdp_managed_module",
    "transformers.modeling_utils:safe_open",
    "transformers.modeling_utils:log_state_dict_report",
    "transformers.loss.loss_for_object_detection:reduce",
    "transformers.loss.loss_lw_detr:_is_torch_distributed_initialized",
    "transformers.loss.loss_rf_detr:_is_torch_distributed_initialized",
}


def test_the_page_is_current(capsys):
    assert patch_list.main(["--check"]) == 0, f"docs/reference/patches.md is out of date: run {patch_list.COMMAND}"


def test_a_page_that_is_out_of_date_is_told_and_written(tmp_path, capsys):
    page = tmp_path / "patches.md"
    page.write_text(patch_list.page().replace("| torch |", "| tarch |"))
    assert patch_list.main(["--check", "--page", str(page)]) == 1
    assert capsys.readouterr().err == "docs/reference/patches.md is out of date: run python -m tests.patch_list\n"
    assert patch_list.main(["--page", str(page)]) == 0
    assert patch_list.main(["--check", "--page", str(page)]) == 0


def test_every_patch_is_listed_once_with_its_reason():
    """Two replacements of one target would depend on their order."""
    patches = patch_list.list_patches()
    rows = patch_list.page().splitlines()
    targets = [patch.target for patch in patches]
    assert len(set(targets)) == len(targets)
    assert all(any(f"`{patch.target}` | {patch.reason} |" in row for row in rows) for patch in patches)


def test_functions_are_replaced_by_every_name_that_libraries_give_them():
    """`accelerate.utils.reduce` is `accelerate.utils.operations.reduce`, and models import the former."""
    left = {}
    for patch in (patch for patch in patch_list.list_patches() if not (patch.late or patch.adds or patch.copies)):
        owner, name = patch.owner_and_name()
        function = inspect.getattr_static(owner, name)
        if isinstance(owner, ModuleType) and callable(function) and patch.library != "torch":
            others = [
                f"{m.__name__}:{known_as}" for m, known_as in find_names_of([function])[id(function)] if m is not owner
            ]
            left |= {patch.target: others} if others and patch.target not in OF_ONE_MODULE else {}
    assert not left


def test_a_function_is_found_by_another_name():
    module = ModuleType("a_script")
    module.gather_all = transformers.loss.loss_for_object_detection.reduce
    sys.modules["a_script"] = module
    try:
        places = find_names_of([accelerate.utils.reduce, accelerate.utils.gather])
        assert (module, "gather_all") in places[id(accelerate.utils.reduce)]
        assert (module, "gather_all") not in places[id(accelerate.utils.gather)]
    finally:
        del sys.modules["a_script"]
