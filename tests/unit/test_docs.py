"""Every command that README and docs show is run by tests/processes/test_docs.py, or named here with its test.

A command that is new on a page is run by the kind of its program; where that cannot be, it needs a line in ELSEWHERE.
"""

import contextlib
import importlib
import importlib.util
import io
import re
from functools import partial

import pytest

from hf_parallel import cli
from tests.commands import PYTHON, ROOT, Shown, commands, shown

#: What runs a command that does not run here: it takes minutes, many nodes, the Hub, or is a line of Python.
ELSEWHERE = {
    r"make (demo|test|test-all|quick|lint|matrix|gpu|proofs)": "Makefile",
    r"hf-parallel launch train\.py .*": "tests/unit/test_cli.py::test_without_a_spec_a_layout_is_chosen",
    r"hf-parallel plan \S+ --gpus \d+ --gpu \S+( --lora)?": "tests/planner/test_memory_table.py::test_a_cell",
    r"(hf-parallel|torchrun -m hf_parallel.cli) plan .*--(cluster|detect).*": (
        "tests/planner/test_mixed_clusters.py::test_the_command"
    ),
    r"python -m tests\.prove\.table --kind clean.*": "tests/prove/test_faults.py::test_clean",
    r"python -m tests\.memory_table": "tests/planner/test_memory_table.py::test_pages_say_what_the_results_say",
    r"python -m tests\.cuda.*|python -m pytest tests/cuda": "tests/cuda/test_layouts.py::test_data_parallelism",
    r"python -m pytest -q tests/unit/\S+": "tests/unit/test_config.py::test_grids_that_are_none_of_the_ranks",
    r"python -m pytest -p tests\.cuda\.plugin .*": "tests/cuda/test_scripts.py::test_short_scripts",
    r"pip install nvidia-ml-py": "tests/parity/test_pipeline_energy.py::test_steps_take_as_long",
    r"hf-parallel launch .* examples/finetune_lora\.py": "tests/parity/test_lora.py::test_script_as_peft_shows_it",
    r"hf-parallel launch .*pipedream_2bw examples/.*": "tests/parity/test_delayed_updates.py::test_as_its_rule",
    r"python -m tests\.prove\.table --kind originals.*": "tests/prove/test_command.py::test_page_of_proofs",
    r"python -m pytest --all tests/prove": "tests/prove/test_faults.py::test_found",
    r"make site": "tests/unit/test_site.py::test_it_has_every_page_and_the_support_matrix",
    r"make( gpu-[a-z]+)+": "tests/processes/test_gpu_parts.py::test_part_without_a_gpu",
    r"make gpu WHEELS=.*": "tests/unit/test_gpu_parts.py::test_an_environment_from_a_folder_of_wheels",
    r"python -m benchmarks.gpu .*": "tests/processes/test_gpu_parts.py::test_part_without_a_gpu",
    r"python -m benchmarks.single_gpu.*": "tests/processes/test_single_gpu.py::test_the_table_without_a_gpu",
    r"hf-parallel prove --device cuda .*": "tests/cuda/test_scripts.py::test_prove_on_gpus",
    r"hf-parallel prove --parallel auto .*": "tests/prove/test_command.py::test_auto",
    r"hf-parallel prove .*": "tests/prove/test_command.py::test_proof_of_a_script",
    r"hf-parallel migrate .*": "tests/unit/test_migrate.py::test_the_table_for_people",
    r"hf-parallel bisect .*": "tests/prove/test_bisect.py::test_runs_that_agree",
    r"hf-parallel check.*": "tests/processes/test_check.py::test_four_ranks",
    r"torchrun .* -m hf_parallel.cli check": "tests/unit/test_launched.py::test_slurm",
    r"hf_parallel\.notebook_launcher\(.*": "tests/parity/test_notebook.py::test_a_cell_trains_as_in_one_process",
    r".*torchrun .* -m (swift\.cli|llamafactory|axolotl\.cli)\..*": "tests/processes/test_runner.py::test_module",
    r"kubectl apply .*|docker build .*": "tests/processes/test_clusters.py::test_manifests_agree",
    r"sky jobs launch .*": "tests/processes/test_clusters.py::test_a_pod_starts_torchrun_and_the_runner",
    r'pip install "hf-parallel.*|hf-parallel recipe run .*': (
        "tests/processes/test_recipe_cli.py::test_a_new_users_path"
    ),
    r"hf-parallel recipe check .*": "tests/planner/test_recipes.py::test_runs_dry",
    r"hf-parallel recipe push .*": "tests/unit/test_recipe_cli.py::test_push_writes_the_file_and_a_section",
    r"python benchmarks/first_step.py": "tests/processes/test_recipe_cli.py::test_a_new_users_path",
    r"pip install --no-index.*": "tests/unit/test_gpu_parts.py::test_an_environment_from_a_folder_of_wheels",
    r"pip install (\.|.\.\[.*|.hf-.*|axo.*)": "tests/unit/test_docs.py::test_an_installation_has_what_the_pages_call",
    r"torchrun --nnodes=1:2 .*|export TORCH_.*": "tests/reliability/test_elastic.py::test_as_undisturbed",
    r"torchrun --max-restarts=3": "tests/reliability/test_restarts.py::test_two_lost_ranks_change_nothing",
    r"hf-parallel launch --ray .*--min_processes .*": "tests/reliability/test_ray.py::test_a_lost_node",
    r"hf-parallel launch --ray .*": "tests/reliability/test_ray.py::test_two_lost_workers_change_nothing",
    r"python integrations/ray/grpo.py .*": "tests/reliability/test_ray.py::test_policy_rollouts_and_rewards_as_actors",
    r"from hf_parallel\.cli\.ray_launcher import .*": "tests/reliability/test_ray.py::test_a_lost_node",
    r"python -m hf_parallel\.rollouts .*": "tests/parity/test_rollout_protocol.py::test_what_the_client_asks_for",
    r"hf-parallel launch .*--parallel auto .*": "tests/planner/test_auto.py::test_trainer",
    r"hf-parallel check --calibrate.*": "tests/planner/test_calibration.py::test_measuring",
    r"hf-parallel plan .*--gpu measured.*": "tests/planner/test_calibration.py::test_plan_shows_both",
    r"hf-parallel plan .*--calibrate .*": "tests/unit/test_monitor.py::test_plan_with_a_record",
    r"accelerator\.log\(hf_parallel\.metrics.*": "tests/reliability/test_monitor_shares.py::test_a_loop_asks",
    r"hf-parallel export .*--trainer.*": "tests/parity/test_resume.py::test_exported_for_plain_trainer",
    r"hf-parallel export .*--push_to_hub .*": "tests/reliability/test_export.py::test_push_to_hub",
    r"python -m tests.sweep_losses.*": "tests/parity/test_model_losses.py::test_boxes_are_those_of_all_data_ranks",
    r"python -m tests.sweep_experts": "tests/parity/test_expert_models.py::test_one_step",
    r"python -m benchmarks\.learned_here": (
        "tests/planner/test_calibration.py::test_six_layouts_are_planned_as_they_run"
    ),
    r"python -m benchmarks.six_plans": "tests/planner/test_plan_cli.py::test_cheapest_of_the_six_plans",
    r"python -m benchmarks.planner_held_out .*": (
        "tests/planner/test_published.py::test_memory_of_series_that_are_left_out"
    ),
    r"python -m benchmarks.compression": "tests/parity/test_zeropp.py::test_loss_of_a_run_with_compression",
    r"python -m benchmarks.zero_side_by_side": "tests/parity/test_zero_stages.py::test_beside_accelerates_own_and_ddp",
    r"python -m benchmarks.uneven": "tests/parity/test_batch_shares_auto.py::test_gain_beside_a_slow_rank",
    r"python -m benchmarks.slow_network": "tests/parity/test_zeropp.py::test_planned_order_on_a_slow_link",
    r"python -m tests.patch_list": "tests/unit/test_patch_list.py::test_the_page_is_current",
    r"python -m tests.activations": "tests/parity/test_activation_memory.py::test_formula_in_one_process",
    r"(import hf_parallel|TrainingArguments\(parallel.*)": (
        "tests/processes/test_flag.py::test_flag_before_transformers"
    ),
    r"(model = )?hf_parallel\.parallelize\(.*": "tests/parity/test_library.py::test_same_numbers_as_one_process",
    r"hf_parallel\.clip_grad_norm\(.*": "tests/parity/test_library.py::test_same_numbers_as_one_process",
    r".*hf_parallel\.full_(state_dict|tensor)\(.*": "tests/parity/test_idioms.py::test_answers_of_every_rank",
    r"hf_parallel\.plan\(.*": "tests/planner/test_search.py::test_public_name",
    r"from hf_parallel\.planner\.dryrun import .*": "tests/planner/test_dry_run.py::test_process_is_as_before",
    r"from hf_parallel\.planner import predict": "tests/planner/test_predict.py::test_parts_add_up",
}


def elsewhere(command: Shown) -> str | None:
    """The test that runs a command, if this file does not."""
    return next((test for pattern, test in ELSEWHERE.items() if re.fullmatch(pattern, command.text)), None)


ALL = shown()


def quietly(call) -> tuple[int, str]:
    """A program's exit code and what it wrote."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = call()
        except SystemExit as stop:
            code = stop.code
    return code or 0, out.getvalue()


@pytest.mark.parametrize("command", [item for item in ALL if elsewhere(item)], ids=lambda item: item.text)
def test_named_test_is_there(command):
    """ELSEWHERE names files and functions that exist."""
    file, _, function = elsewhere(command).partition("::")
    text = (ROOT / file).read_text()
    if file == "Makefile":
        assert re.search(rf"^{command.words[1]}:", text, re.MULTILINE), f"make has no {command.words[1]}"
    else:
        assert f"def {function}(" in text


def test_no_line_without_use():
    """ELSEWHERE names nothing that the pages no longer show."""
    used = {pattern for pattern in ELSEWHERE for item in ALL if re.fullmatch(pattern, item.text)}
    assert used == set(ELSEWHERE)


def test_an_installation_has_what_the_pages_call():
    """The command that pip makes, and the folder that it installs."""
    text = (ROOT / "pyproject.toml").read_text()
    module, _, function = re.search(r'^hf-parallel = "(.+)"', text, re.MULTILINE)[1].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert 'packages = ["hf_parallel"]' in text


def test_options_in_tables_are_options_of_plan():
    """docs/dry_run.md lists the options of `plan`."""
    section = (ROOT / "docs" / "dry_run.md").read_text().partition("## `hf-parallel plan`")[2].partition("\n## ")[0]
    code, text = quietly(partial(cli.main, ["plan", "--help"]))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section))
    assert code == 0
    assert len(named) > 15
    assert {name for name in named if name not in text} == set()


@pytest.mark.parametrize("page", sorted({item.page for item in ALL}))
def test_files_and_names_are_there(page):
    """Files of the repository that a page names or links to, and what it says `hf_parallel` has."""
    text = (ROOT / page).read_text()
    here = (ROOT / page).parent
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (here / link).exists()] == []
    files = re.findall(r"`((?:hf_parallel|tests|benchmarks|examples|configs|integrations|docs)/[\w./-]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    for name in re.findall(r"\bhf_parallel((?:\.[a-z_]+)+)\(", text):
        holder, _, attribute = f"hf_parallel{name}".rpartition(".")
        assert hasattr(importlib.import_module(holder), attribute), name


def test_the_architecture_names_what_is_there():
    text = (ROOT / "docs" / "reference" / "architecture.md").read_text()
    files = {name.rstrip("/") for name in re.findall(r"[\w*]+(?:/[\w*]+)*(?:\.py|/)(?=[\s,|`)])", text)}
    assert len(files) > 40
    there = [name for name in files if (ROOT / name).exists() or any((ROOT / "hf_parallel").rglob(name))]
    assert files - {*there} == {"axes/NAME.py"}


def test_what_counts_as_a_command():
    page = """
Run `hf-parallel launch
  --x` or `tp=2`; `make` alone is a word.

    HF_PARALLEL=SPEC torchrun --a \\
        b      # why
    out  of  a program

```bash
anything
```
```
$ asked for
printed
```
| cell | `python -m this …` |
"""
    expected = [
        "anything",
        "asked for",
        "HF_PARALLEL=SPEC torchrun --a b",
        "hf-parallel launch --x",
        "python -m this …",
    ]
    assert commands(page) == expected
    assert PYTHON.search("x = hf_parallel.plan(y)")


def test_llms_txt_links_to_pages_that_are_there():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_ten_tasks_have_a_command_and_a_page():
    """Each section of docs/tasks.md; `test_command` runs the commands, `test_named_test_is_there` the long ones."""
    sections = re.split(r"^## (?=\d)", (ROOT / "docs" / "tasks.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.partition(".")[0] for section in sections] == [str(number) for number in range(1, 11)]
    known = {item.text for item in ALL}
    for section in sections:
        found = commands(section)
        assert found, section
        assert {*found} <= known, section
        assert re.search(r"\]\([\w/]+\.md", section), section


def test_the_skill_names_itself():
    """Its front matter has the name and the description by which an agent finds it."""
    _, front, text = (ROOT / "integrations" / "skill" / "SKILL.md").read_text().split("---\n", 2)
    assert re.search("^name: train-on-n-gpus$", front, re.MULTILINE)
    assert 100 < len(re.search("^description: (.+)$", front, re.MULTILINE)[1]) < 1024
    assert len(commands(text)) > 8


def test_the_page_of_models_keeps_its_mixtures():
    """What `tests.sweep` writes has the part of `tests.sweep_experts` as it was, whose models have no other row."""
    from tests import sweep

    cases = {name: {"class": "ok", "text": ""} for name in ("tp=2 16", "pp=2 16")}
    swept = {f"causal {name} Class": {"cases": cases} for name in ("llama", "mixtral")}
    mixtures = sweep.read_mixtures(sweep.PAGE.read_text())
    assert "| mixtral | causal LM |" in mixtures
    page = sweep.table(swept, mixtures)
    assert sweep.read_mixtures(page) == mixtures
    assert page.count("| llama | causal LM |") == page.count("| mixtral |") == 1
    assert sweep.table(swept).count("| mixtral |") == 1
