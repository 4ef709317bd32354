"""What `pip install` brings: the wheel has the whole package, and the command completes in shells."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_parallel import cli

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> list[str]:
    """Files of the wheel."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    assert list(folder.glob("*.tar.gz"))
    return zipfile.ZipFile(next(folder.glob("*.whl"))).namelist()


def test_the_wheel_is_whole(names):
    """Every file of the package, its types, and nothing beside it."""
    files = [path for path in (REPOSITORY / "hf_parallel").rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(REPOSITORY)) for path in files if "__pycache__" not in path.parts}
    assert "hf_parallel/py.typed" in wanted
    assert wanted == {name for name in names if name.startswith("hf_parallel/")}
    assert {name.split("/")[0] for name in names} == {"hf_parallel", "hf_parallel-0.1.0.dist-info"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete(shell, capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert "doctor" in script
    assert "--global-batch" in script
