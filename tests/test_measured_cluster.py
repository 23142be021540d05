"""A measured cluster prices every collective and op, is written and read back the same, and plans."""

from __future__ import annotations

from pathlib import Path

import pytest

import distpar
from distpar.cost.cluster import KINDS
from distpar.errors import UsageError
from models import mlp


@pytest.mark.timeout(120)
def test_two_ranks_measure_this_machine(tmp_path: Path) -> None:
    cluster = distpar.Cluster.measure(2)
    assert {row.kind for row in cluster.network} == set(KINDS)
    for row in cluster.network:
        assert row.num_ranks == 2 and 0 < row.seconds[0] <= row.seconds[-1] < 60
        assert list(row.seconds) == sorted(row.seconds)
    assert {("matmul", "f32"), ("convolution", "f64")} <= {(s.family, s.dtype) for s in cluster.speeds}
    assert cluster.memory > 2**20 and cluster.bandwidth > 1e6 and 0 < cluster.floor < 0.1
    path = tmp_path / "cluster.json"
    cluster.save(path)
    assert distpar.Cluster.load(path) == cluster
    step, args = mlp(5)
    plan = distpar.plan(step, *args, mesh=distpar.Mesh(a=2), cluster=path)
    assert plan.prediction is not None and plan.prediction.seconds > 0


def test_one_rank_has_no_links_to_measure() -> None:
    with pytest.raises(UsageError, match="two ranks"):
        distpar.Cluster.measure(1)
