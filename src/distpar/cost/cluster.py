"""What the machine can do: links, compute, memory. A value, read from a file, a preset or a measurement.

A collective's time is read off measured points (bytes, seconds) for its kind, its link class and its group
size, linearly between points and by the last slope beyond them. A compute op's time is a roofline with a
floor. Kinds are the runtime's own calls: "all_reduce", "all_gather", "all_to_all" (a reduce-scatter is an all-to-all of
blocks and a local sum).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distpar.errors import UsageError

KINDS = ("all_reduce", "all_gather", "all_to_all")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Points:
    """Seconds against bytes that one rank sends, measured for one kind, link class and group size."""

    kind: str
    link: str
    """"intra" (all ranks on one host) or "inter"."""
    num_ranks: int
    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        """Piecewise linear; below the first point its value, beyond the last one the last slope."""
        xs, ys = self.num_bytes, self.seconds
        if num_bytes <= xs[0]:
            return ys[0]
        for left in range(len(xs) - 1):
            if num_bytes <= xs[left + 1] or left == len(xs) - 2:
                slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
                return max(ys[left], ys[left] + slope * (num_bytes - xs[left]))
        return ys[-1]


@dataclass(frozen=True, slots=True)
class Speed:
    """Peak operations a second of one op family in one dtype."""

    family: str
    """"matmul", "convolution" or "attention"."""
    dtype: str
    flops: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """One kind of machine.

    Attributes:
        ranks_per_host: consecutive ranks share a host.
        memory: bytes a rank may use.
        bandwidth: bytes a second that one rank reads or writes in its memory.
        floor: seconds of the smallest op, with its share of the runtime's overhead.
    """

    name: str
    ranks_per_host: int
    memory: int
    bandwidth: float
    floor: float
    speeds: tuple[Speed, ...]
    network: tuple[Points, ...]

    @staticmethod
    def preset(name: str) -> Cluster:
        """A machine by name: cpu, dgx-v100, dgx-a100, dgx-h100, or with xN for N hosts.

        Raises:
            UsageError: there is no such preset.
        """
        from distpar.cost.presets import preset

        return preset(name)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """A machine from a file that `save` wrote.

        Raises:
            UsageError: the file is missing or is not a cluster.
        """
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return _from_json(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"cannot read the cluster {path}",
                why=f"{type(error).__name__}: {error}",
                fix="write it with `distpar measure -o cluster.json`, or name a preset",
            ) from error

    @staticmethod
    def measure(num_ranks: int = 2) -> Cluster:
        """This machine, measured with `num_ranks` local ranks in under a minute."""
        from distpar.cost.measure import measure

        return measure(num_ranks)

    def __str__(self) -> str:
        """A line for compute and one for each measured collective, in round units."""
        compute = ", ".join(f"{row.family} {row.dtype} {row.flops / 1e9:.4g} GF/s" for row in self.speeds)
        lines = [
            f"cluster {self.name}: {self.ranks_per_host} ranks a host, {self.memory / 2**30:.3g} GiB a rank, "
            f"memory {self.bandwidth / 1e9:.3g} GB/s, smallest op {1e6 * self.floor:.3g} us",
            f"  {compute}",
        ]
        for row in self.network:
            last = (row.num_bytes[-1] - row.num_bytes[-2]) / max(1e-12, row.seconds[-1] - row.seconds[-2])
            lines.append(
                f"  {row.kind:<10} {row.num_ranks:>3} ranks {row.link}: smallest {1e6 * row.seconds[0]:.3g} us, "
                f"large {last / 1e9:.3g} GB/s"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n")

    def link(self, ranks: tuple[int, ...]) -> str:
        """ "intra" when all the ranks are on one host, else "inter"."""
        return "intra" if len({rank // self.ranks_per_host for rank in ranks}) == 1 else "inter"

    def collective(self, kind: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Seconds of one collective in which the busiest rank sends `num_bytes`."""
        link = self.link(ranks)
        rows = [row for row in self.network if row.kind == kind and row.link == link]
        rows = rows or [row for row in self.network if row.kind == kind]
        assert rows, f"bug: the cluster {self.name} knows no {kind}"
        nearest = min(rows, key=lambda row: (abs(row.num_ranks - len(ranks)), row.num_ranks))
        # A larger group than was measured waits in proportion to its hops; the bytes are the caller's.
        start = nearest.seconds[0] * max(1.0, (len(ranks) - 1) / max(1, nearest.num_ranks - 1))
        return start - nearest.seconds[0] + nearest.at(num_bytes)

    def flops(self, family: str, dtype: str) -> float:
        """Peak operations a second; a dtype that was not measured runs like f32."""
        for wanted in ((family, dtype), ("matmul", dtype), (family, "f32"), ("matmul", "f32")):
            for row in self.speeds:
                if (row.family, row.dtype) == wanted:
                    return row.flops
        raise AssertionError(f"bug: the cluster {self.name} has no speed")


def _from_json(data: dict[str, Any]) -> Cluster:
    speeds = tuple(Speed(**row) for row in data.pop("speeds"))
    network = tuple(
        Points(**(row | {key: tuple(row[key]) for key in ("num_bytes", "seconds")})) for row in data.pop("network")
    )
    for row in network:
        if row.kind not in KINDS or len(row.num_bytes) != len(row.seconds) or len(row.seconds) < 2:
            raise ValueError(f"the points of {row.kind} over {row.num_ranks} ranks are not usable")
    return Cluster(**data, speeds=speeds, network=network)


def parse_name(name: str) -> tuple[str, int]:
    """`"dgx-h100x8"` -> `("dgx-h100", 8)`."""
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", name)
    assert match is not None, "bug: every text matches"
    return match[1], int(match[2] or 1)
