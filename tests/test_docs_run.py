"""What the documents tell a user to type runs, as it stands there, in a folder of its own; links lead to files."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[ ]*(?:title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MADE_BY_CI = ("make ", "pip ", "git ", "cd ")
"""Commands that install: continuous integration runs them, from a clean clone."""


def commands(page: Path) -> list[str]:
    text = "".join(body for kind, _, body in FENCE.findall(page.read_text()) if kind == "console")
    return [line[2:] for line in text.splitlines() if line.startswith("$ ") and not line[2:].startswith(MADE_BY_CI)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for _, name, body in FENCE.findall(page.read_text()):
        if name:
            (tmp_path / name).write_text(body)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    for command in commands(page):
        ran = subprocess.run(
            command.split(), cwd=tmp_path, env={**os.environ, "PATH": scripts, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        assert ran.stdout.strip(), f"{command} prints nothing"


def test_the_readme_has_commands_to_run() -> None:
    assert len(commands(ROOT / "README.md")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
