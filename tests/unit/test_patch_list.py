"""docs/patches.md lists the patches that there are."""

from tests import patch_list


def test_the_page_is_current(capsys):
    assert patch_list.main(["--check"]) == 0, f"docs/patches.md is out of date: run {patch_list.COMMAND}"


def test_a_page_that_is_out_of_date_is_told_and_written(tmp_path, capsys):
    page = tmp_path / "patches.md"
    page.write_text(patch_list.page().replace("| torch |", "| tarch |"))
    assert patch_list.main(["--check", "--page", str(page)]) == 1
    assert capsys.readouterr().err == "docs/patches.md is out of date: run python -m tests.patch_list\n"
    assert patch_list.main(["--page", str(page)]) == 0
    assert patch_list.main(["--check", "--page", str(page)]) == 0


def test_every_patch_is_listed_once_with_its_reason():
    """Two replacements of one target would depend on their order."""
    patches = patch_list.all_patches()
    rows = patch_list.page().splitlines()
    targets = [patch.target for patch in patches]
    assert len(set(targets)) == len(targets)
    assert all(any(f"`{patch.target}` | {patch.reason} |" in row for row in rows) for patch in patches)
