"""The command line: every wrong use is three lines on stderr and exit code 2, and nothing is lost or left."""

import sys
from pathlib import Path

import pytest

from distpar import Plan, __version__
from distpar.cli.main import main

JOB = """
import torch
from torch import nn

def job():
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(8, 4))

def returns_a_number():
    return 7

def raises():
    return {}["learning_rate"]

def exits():
    raise SystemExit(3)

def takes_an_argument(width):
    return width

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with jobs in it, entered."""
    (tmp_path / "train.py").write_text(JOB)
    (tmp_path / "broken.py").write_text("def job(:\n    pass\n")
    (tmp_path / "missing_module.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "notes.txt").write_text("def job(): pass\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: its exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["distpar", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return call


PLAN = ("plan", "train.py:job")
VERIFY = ("verify", "train.py:job")
BENCH = ("bench", "train.py:job")
WRONG = [
    ("plam",),
    ("--nothing",),
    ("plan",),
    (*PLAN, "--rank", "2"),
    (*PLAN, "--ranks", "0"),
    (*PLAN, "--ranks", "-1"),
    (*PLAN, "--ranks", "two"),
    (*PLAN, "--ranks", "2", "--mesh", "dp=2"),
    (*PLAN, "--mesh", "dp"),
    (*PLAN, "--mesh", "dp=0"),
    (*PLAN, "--mesh", "dp=2,dp=2"),
    (*PLAN, "--mesh", ""),
    (*PLAN, "--cluster", "dgx-a1000"),
    (*PLAN, "--cluster", "no_such_file.json"),
    (*PLAN, "--cluster", "bad.json"),
    (*PLAN, "--cluster", "list.json"),
    (*PLAN, "--memory-limit", "16Gib2"),
    (*PLAN, "--memory-limit", "-1GiB"),
    (*PLAN, "--solver", "exakt"),
    (*PLAN, "--solver", "random:x"),
    (*PLAN, "--space", "ful"),
    (*PLAN, "--beta", "-1"),
    (*PLAN, "--beta", "nan"),
    (*PLAN, "--beta", "x"),
    (*PLAN, "--pin", "weight"),
    (*PLAN, "--pin", "no.such.name=[*, *]"),
    (*PLAN, "--pin", "model.weight=[*/tp, *]"),
    (*PLAN, "--pin", "model.weight=[*"),
    (*PLAN, "--pin", "model.weight=[*, *]", "--pin", "model.weight=[*, *]"),
    (*PLAN, "--time-limit", "0"),
    (*PLAN, "-o", "no_folder/plan.json"),
    (*PLAN, "-o", "."),
    (*PLAN, "--table", "--json"),
    ("plan", "train.py"),
    ("plan", "tain.py:job"),
    ("plan", "train.py:jab"),
    ("plan", "train.py:"),
    ("plan", "train.py:not_a_function"),
    ("plan", "train.py:returns_a_number"),
    ("plan", "train.py:raises"),
    ("plan", "train.py:exits"),
    ("plan", "train.py:takes_an_argument"),
    ("plan", "broken.py:job"),
    ("plan", "missing_module.py:job"),
    ("plan", "notes.txt:job"),
    (*VERIFY, "--steps", "0"),
    (*VERIFY, "--steps", "x"),
    (*VERIFY, "--ranks", "0"),
    (*VERIFY, "--plan", "no_such_plan.json"),
    (*VERIFY, "--plan", "bad.json"),
    (*VERIFY, "--plan", "list.json"),
    (*VERIFY, "--plan", "bad.json", "--ranks", "2"),
    ("measure", "-o", "no_folder/cluster.json"),
    ("measure", "-o", "."),
    ("measure", "--ranks", "0"),
    ("demo", "--only", "faces"),
    ("demo", "--steps", "0"),
    ("demo", "--identities", "0"),
    ("demo", "--ranks", "0"),
    (*BENCH, "--against", "dpp"),
    (*BENCH, "--rounds", "0"),
    (*BENCH, "--steps", "0"),
    (*BENCH, "--ranks", "0"),
    ("bench", "train.py:raises"),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_use_is_three_lines_and_exit_code_2(words, run, folder):
    before = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    code, out, err = run(*words)
    assert code == 2, err
    assert out == ""
    lines = err.rstrip("\n").split("\n")
    assert len(lines) == 3 and lines[1].startswith("  why: ") and lines[2].startswith("  fix: "), err
    # It speaks of what was wrong: of the flag or its value, or of the job.
    assert any(word.strip("-") in err for word in (words[2:] or words[-1:])), err
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


def test_the_users_own_line_is_named(run, folder):
    line = 1 + JOB.split("\n").index('    return {}["learning_rate"]')
    _, _, err = run("plan", "train.py:raises")
    assert f"train.py:{line}" in err and "learning_rate" in err


def test_debug_shows_the_traceback_wherever_it_stands(run, folder):
    for words in (("--debug", "plan", "train.py:raises"), ("plan", "train.py:raises", "--debug")):
        code, _, err = run(*words)
        assert code == 2 and "Traceback" in err and 'File "' in err


def test_no_plan_within_the_memory_is_exit_code_1(run, folder):
    code, out, err = run(*PLAN, "--memory-limit", "1B")
    assert (code, out) == (1, "") and len(err.rstrip("\n").split("\n")) == 3


def test_json_and_o_give_the_same_plan_and_verify_takes_it(run, folder):
    code, out, _ = run(*PLAN, "--ranks", "3", "-o", "plan.json", "--json")
    assert code == 0 and out == Path("plan.json").read_text().rstrip("\n") + "\n"
    assert Plan.load("plan.json").mesh.num_ranks == 3
    code, out, _ = run(*VERIFY, "--plan", "plan.json", "--steps", "2")
    assert code == 0 and "Mesh(ranks=3)" in out


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"{__version__}\n")
    for words in ((), ("--help",), *((name, "--help") for name in ("plan", "verify", "measure", "demo", "bench"))):
        code, out, err = run(*words)
        assert (code, err) == (0, "") and "distpar" in out
