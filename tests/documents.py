"""The project's documents, the commands in them, the test that runs each, and how a reader would run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLACES = (
    "*.md",
    "docs/*.md",
    "examples/*/*.md",
    "benchmarks/*.md",
    "benchmarks/results/*.md",
    "domino_lm/*/*.md",
    "tests/*.md",
    "tests/*/*/*.md",
)
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for place in _PLACES for path in ROOT.glob(place))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
_COMMAND = re.compile(
    r"(\w+=\S+ )*((python|torchrun|sbatch|pip|bash|pytest) \S|make( |$)|domino-lm-|(examples|tools|benchmarks)/\S+\.(sh|py) \S)"
)

_DOCUMENTS = "distributed/test_documents.py::test_"
_COMMANDS = "distributed/test_document_commands.py::test_"
RUN_BY = {
    r"--dump-on-nan runs|--replay runs": "distributed/test_nan_dump.py::test_a_broken_weight_is_found_and_shown_again_as_the_page_says",
    r"\$(MODEL|RUN)\b|^TWO=|parallel_blocks": "distributed/test_any_transformer.py::test_the_page_runs_as_it_is_typed",
    r"^make$": f"{_COMMANDS}make_alone_lists_every_target",
    r"^make (check|format)": f"{_COMMANDS}make_format_mends_what_make_check_refuses",
    r"^make test PYTEST": f"{_COMMANDS}make_test_runs_what_is_asked_for",
    r"^make test": f"{_COMMANDS}make_test_leaves_out_what_make_test_all_runs",
    r"^make setup VENV": f"{_COMMANDS}setting_up_an_environment_that_exists_changes_no_version_in_it",
    r"^make setup TORCH": f"{_COMMANDS}setting_up_with_another_torch_installs_that_one",
    r"^python -m pip install": f"{_COMMANDS}the_extra_packages_are_installed_by_their_names",
    r"^make demo": f"{_DOCUMENTS}make_demo_runs_without_a_warning",
    r"^make chaos": "distributed/test_chaos.py::test_a_part_of_the_campaign_runs_from_the_command_line",
    r"^make gpu-check GPU_CHECK": f"{_COMMANDS}the_check_of_a_gpu_can_be_rehearsed",
    r"^make walk": "unit/test_readme_walk.py::test_a_walk_types_each_command_once_in_a_clone_and_records_what_came_of_it",
    r"^make gpu-check": "unit/test_gpu_check.py::test_without_a_gpu_nothing_is_measured",
    r"^domino-lm-(generate|eval) |tools/generate\.py ": "distributed/test_generate.py::test_the_commands_of_the_page_on_generation_run",
    r"--optimizer muon": "distributed/test_muon.py::test_the_command_of_the_page_learns",
    r"head_to_head\.py --help|^domino-lm-|pretrain$": f"{_COMMANDS}a_program_explains_its_flags",
    r"^make bench|^python benchmarks/head_to_head": f"{_COMMANDS}a_comparison_runs_at_a_tiny_size",
    r"predict_shaped\.py": f"{_COMMANDS}the_comparison_is_predicted_as_recorded_within_a_tenth",
    r"when_domino_pays\.py|paper_figures\.py": f"{_COMMANDS}predicted_tables_are_the_recorded_ones",
    r"--print-plan": "unit/test_remarks.py::test_the_plans_that_the_document_shows_are_those_that_its_commands_print",
    r"simulate\.py": f"{_COMMANDS}the_simulator_answers_for_a_model_and_a_cluster",
    r"test_arguments\.py$": f"{_COMMANDS}the_command_line_is_recorded_again",
    r"merge_datasets\.py": f"{_COMMANDS}all_pairs_of_a_folder_become_one",
    r"convert_checkpoint\.py": f"{_COMMANDS}conversions_lead_from_one_to_the_next",
    r"--load checkpoints/megatron": f"{_COMMANDS}a_checkpoint_of_megatrons_is_trained_on",
    r"plot_timeline\.py benchmarks/results": f"{_COMMANDS}the_timeline_of_the_readme_is_drawn_again",
    r"tools/preflight\.py": "distributed/test_preflight.py::test_the_command_of_the_document_looks_at_two_ranks",
    r"^torchrun --max-restarts": "distributed/test_elastic.py::test_a_run_that_loses_a_rank_ends_as_the_unbroken_one",
    r"data\.py .*runs/data": "unit/data/test_page.py::test_the_commands_of_the_page_run",
    r"pretrain_gpt\.py": "unit/test_readme.py::test_megatrons_command_moves_over_by_its_program_alone",
    r"^torchrun --nproc-per-node 8 -m domino_lm|examples/\w+/\w+_[\d.]+m?b\.sh": f"{_DOCUMENTS}a_command_for_a_cluster_is_sound_as_it_is_typed",
    r"^WORLD_SIZE=64 python -m domino_lm\.pretrain --dry-run": f"{_DOCUMENTS}the_memory_command_answers_for_all_its_ranks",
    r"^NPROC=2 .*debug\.sh": f"{_DOCUMENTS}the_command_for_two_cpu_processes_trains_on_the_demos_tokens",
    r"runs/real|^(export|for|done|FLAGS|EXTRA_ARGS)": f"{_DOCUMENTS}the_page_on_training_runs_as_it_is_typed",
    r"activate$|--mock-data$|--input my\.jsonl|--nproc-per-node 2 |plot_(run|timeline)\.py runs": f"{_DOCUMENTS}the_commands_for_ones_own_text_lead_from_text_to_curves",
}
"""A pattern of commands, and the test that runs them. Three stand in for what a machine may lack: Megatron's program, a GPU, Slurm."""

_DRAWINGS = re.compile(r"(part |baseline|2 rows|2 columns|2 x 2|op \d|link|\d+ +m0|-->|compute )")


def fences(document: str) -> list[str]:
    """Code blocks that hold commands."""
    return [content for language, content in _FENCE.findall((ROOT / document).read_text()) if language in ("", "bash")]


def blocks(document: str) -> list[str]:
    """Commands of the code blocks, fenced or indented, one a line, without their comments."""
    indented = re.findall(r"(?<=\n\n)(?: {4}.*\n)+", _FENCE.sub("", (ROOT / document).read_text()))
    lines = "".join([*fences(document), *indented]).replace("\\\n", " ").splitlines()
    return [" ".join(line.split(" #")[0].split()) for line in lines]


def spans(document: str) -> list[str]:
    """Commands that stand in the prose, between backticks."""
    found = re.findall(r"`([^`]+)`", _FENCE.sub("", (ROOT / document).read_text()))
    return [text for text in (" ".join(span.split()) for span in found) if _COMMAND.match(text)]


def typed(document: str) -> list[str]:
    """Every command of a document. A record's, and the code blocks of a result, are no commands to type, but tell of a run."""
    if document == "docs/readme-walk.md":
        return []
    in_blocks = [] if document.startswith("benchmarks/results/") else blocks(document)
    return [line for line in [*in_blocks, *spans(document)] if line and not _DRAWINGS.match(line)]


def commands(program: str) -> list[tuple[str, str]]:
    """Every command of the code blocks that runs ``program`` and holds no variable, as its document and what follows the program."""
    lines = [(document, line) for document in DOCUMENTS for line in blocks(document) if "$" not in line]
    return [(document, line.split(program, 1)[1]) for document, line in lines if program in line]


def run_by(command: str) -> str | None:
    """The test that runs a command; None where nothing is known to."""
    return next((test for pattern, test in RUN_BY.items() if re.search(pattern, command)), None)


def commands_for(test: str) -> list[str]:
    """The commands that a test is to run, each once."""
    found = [command for document in DOCUMENTS for command in typed(document)]
    return list(dict.fromkeys(command for command in found if (run_by(command) or "").endswith(f"::{test}")))


OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VENV", "TORCH", "PYTEST", "PYTEST_ADDOPTS", "BENCH", "GPU_CHECK", "WALK")


def attempt(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line of a document in ``folder``, with the programs of this environment; nothing comes from a make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=900, check=False)


def here(command: str) -> str:
    """A make command that takes this environment as it is: whatever the dates of files say, it is not set up."""
    return command.replace("make", f"make -o {sys.prefix}/.domino-lm-setup VENV={sys.prefix}", 1)


def copy_of_tree(folder: Path) -> Path:
    """The repository, copied to ``folder`` without what lies in it but is not of it."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "checkpoints", "build", "dist")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))
