"""The examples run alone and under torchrun with the same losses; when a rank is killed all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distpar.launch import load_job

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
EXAMPLES = {"face": ["--identities", "500"], "gpt": [], "resnet": []}


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def losses(command: list[str]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert len(lines) == 1, "rank 0 alone prints the losses, once"
    return [float(word) for word in lines[0].split()[1:]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_ranks_print_the_losses_of_one(name: str) -> None:
    command = [str(ROOT / "examples" / f"{name}.py"), "--steps", "4", *EXAMPLES[name]]
    alone = losses([sys.executable, *command])
    many = losses([*TORCHRUN, "2", "--master-port", str(29600 + len(name)), *command])
    assert len(alone) == 4
    assert many == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_jobs(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 120
    step, args = load_job(f"{path}:job")
    assert callable(step)
    assert isinstance(args, tuple)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_rank_that_ends_ends_all(how: signal.Signals) -> None:
    script = str(ROOT / "examples" / "face.py")
    command = [*TORCHRUN, "2", "--master-port", "29650", script, "--steps", "100000", "--identities", "300"]
    group = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(15)
        ranks = children(group.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], how)
        assert group.wait(30) != 0
        assert not any(alive(rank) for rank in ranks)
    finally:
        group.kill()
        group.wait()


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
