"""One rank's part of a calibration: measures quantity after quantity, fits them, and rank 0 writes the file.

All ranks measure at the same time, exchange their medians, and fit the same numbers, so all end with the same
constants. `calibrate.py` starts the ranks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported
from megatron_augtree.config import InputError
from megatron_augtree.mcore import build
from megatron_augtree.mcore.arguments import add_model_arguments
from megatron_augtree.mcore.sampler import model_shape
from megatron_augtree.planning.cluster import Cluster, cluster_of, document
from megatron_augtree.tools import calibrate_fit as fit
from megatron_augtree.tools.calibrate_measure import CPU, CUDA, Bench, Sizes
from megatron_augtree.tools.measure import commit, machine, write_json

#: Quantity -> its share of the time, in the order of what an error costs (docs/calibration.md).
SHARES = {"stage": 25, "path": 10, "tile": 20, "overlap": 10, "product": 10, "layer": 20, "memory": 5}

#: Share of the memory that is taken for activations; the rest is the model and its optimizer (assumed).
_ACTIVATIONS_PCT = 50

#: Seconds before the end that are kept for fitting and writing.
_CLOSING_S = 5.0


class Calibration:
    """One rank's part: measures, fits (all ranks the same numbers alike), and rank 0 writes.

    Args:
        device: ``cpu`` or ``cuda``; empty takes a GPU where there is one.
        until: when everything should be done, of `time.time`.
        sizes: what is measured, where it is not to be the device's usual model and lengths.

    Raises:
        InputError: no such device for every rank.
    """

    def __init__(self, device: str, until: float, sizes: Sizes | None = None) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        _check_devices(device)
        self.until, self.began = until - _CLOSING_S, time.time()
        self.sizes = sizes or (CUDA if device == "cuda" else CPU)
        self.args = _model_arguments(self.sizes.model, self.sizes.layers[-1])
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
        _join(self.args, self.device)
        config = build.build_config(self.args)
        self.shape = model_shape(config, self.args.vocab_size)
        self.bench = Bench(self.device, self.sizes, self.shape, int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
        self.local_ranks = self.bench.local_ranks
        self.world, self.rank = self.bench.transport.world, self.bench.transport.rank
        self.values: dict[str, Any] = {}
        self.errors: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self.curves: dict[str, list] = {}
        self.left = dict(SHARES)

    def run(self, out_path: str) -> Cluster:
        """Everything; the same on every rank."""
        for name in SHARES:
            start = time.time()
            found = getattr(self, f"_{name}")(self._seconds(name))
            self.values |= found.values
            if found.error is not None:
                self.errors[name] = round(100 * found.error, 1)
            self._say(name, found, time.time() - start)
        self._given()
        names = [field.name for field in fields(Cluster)]
        cluster = Cluster(**{name: self.values[name] for name in names})
        if self.rank == 0:
            write_json(out_path, document(cluster, self._measured()))
        self.bench.transport.same("written")
        return cluster

    def _seconds(self, name: str) -> float:
        """This quantity's share of what is left."""
        share = self.left[name] / sum(self.left.values())
        del self.left[name]
        return max(0.0, share * (self.until - time.time()))

    def _curve(self, name: str, points: Sequence[tuple[tuple[int, ...], float]]) -> fit.Curve:
        """A curve, noted for the file."""
        self.curves[name] = [[*sizes, round(found)] for sizes, found in points]
        return points

    # The quantities, in order.

    def _stage(self, seconds: float) -> fit.Fit:
        bench, sent = self.bench, self.sizes.sent
        (first,) = bench.curve("probe", {(): bench.stages(sent[0], (0, 0), transfers=True)}, 0.0)[()]
        tile, few = bench.tile_lasting(3 * first), sent[:2]
        cases = {}
        for n in sent:
            cases["bare", n] = bench.stages(n, (0, 0), transfers=True)
            cases["none", n] = bench.stages(n, (0, 0), transfers=False)
        for n in few:
            cases["both", n] = bench.stages(n, tile, transfers=True)
            cases["tile", n] = bench.stages(n, tile, transfers=False)
        found = {key: times[0] for key, times in bench.curve("stage", cases, seconds).items()}
        self.bare = self._curve("stage", self._added(found, "bare", "none", sent))
        return fit.fit_stage(self.bare, self._curve("hidden", self._added(found, "both", "tile", few)))

    def _added(self, found: Mapping, more: str, less: str, sent: Sequence[int]) -> list:
        """((bytes,), ns) that transfers add."""
        return [((self.bench.bytes_of(n),), max(1.0, found[more, n] - found[less, n])) for n in sent]

    def _path(self, seconds: float) -> fit.Fit:
        if self.world == self.local_ranks:
            self.notes["nic"] = "all ranks are on one node: taken to be the link's"
            return fit.Fit({"nic_bytes_s": self.values["link_bytes_s"]})
        bench, sent, cases = self.bench, self.sizes.sent, {}
        for n in sent:
            cases["bare", n] = bench.stages(n, (0, 0), transfers=True, across=True)
            cases["none", n] = bench.stages(n, (0, 0), transfers=False, across=True)
        found = {key: times[0] for key, times in bench.curve("path", cases, seconds).items()}
        return fit.fit_path(self._curve("path", self._added(found, "bare", "none", sent)))

    def _tile(self, seconds: float) -> fit.Fit:
        sizes, cases = self.sizes, {}
        for q in sizes.queries:
            for k in sizes.keys:
                cases[q, k] = self.bench.tile(q, k, causal=False)
        for n in sizes.squares:
            cases[(n,)] = self.bench.tile(n, n, causal=True)
        found = self.bench.curve("tile", cases, seconds)
        curves = [
            self._curve(
                f"{name} {way}", [(key, times[i]) for key, times in found.items() if len(key) == length]
            )
            for i, way in enumerate(("forward", "backward"))
            for name, length in (("tile", 2), ("causal tile", 1))
        ]
        fitted, self.tiles = fit.fit_tiles(*curves, self.shape)
        self.notes["merge_ns_a_row"] = round(self.tiles.merge, 1)
        return fitted

    def _overlap(self, seconds: float) -> fit.Fit:
        bench, large, cases = self.bench, self.sizes.sent[-3:-1], {}
        bare = dict(self.bare)
        for n in large:
            tile = bench.tile_lasting(1.5 * bare[(bench.bytes_of(n),)])
            cases["bare", n] = bench.stages(n, (0, 0), transfers=True)
            cases["none", n] = bench.stages(n, (0, 0), transfers=False)
            cases["both", n] = bench.stages(n, tile, transfers=True)
            cases["tile", n] = bench.stages(n, tile, transfers=False)
        found = {key: times[0] for key, times in bench.curve("overlap", cases, seconds).items()}
        shares = [
            fit.hidden_share(alone, added, self.values["stage_ns"])
            for (_, alone), (_, added) in zip(
                self._added(found, "bare", "none", large), self._added(found, "both", "tile", large)
            )
        ]
        share = sum(shares) / len(shares)
        self.notes["hidden_share"] = round(share, 3)
        return fit.Fit({"overlap": share >= 0.5})

    def _product(self, seconds: float) -> fit.Fit:
        cases = {(n,): self.bench.product(n) for n in self.sizes.product_rows}
        found = self.bench.curve("product", cases, seconds)
        curve = self._curve("product", [(key, times[0]) for key, times in found.items()])
        fitted, self.rows = fit.fit_products(curve, self.bench.product_flops, self.shape)
        return fitted

    def _layer(self, seconds: float) -> fit.Fit:
        self.models = [self._model(layers) for layers in self.sizes.layers]
        cases = {
            (layers, n): self.bench.step(model, n)
            for n in self.sizes.model_rows
            for layers, model in zip(self.sizes.layers, self.models)
        }
        found = self.bench.curve("layer", cases, seconds)
        curves = [
            self._curve(f"pass {way}", [(key, times[i]) for key, times in found.items()])
            for i, way in enumerate(("forward", "backward"))
        ]
        percent = self.values["attention_backward_pct"]
        return fit.fit_layers(*curves, self.rows, self.tiles, percent, self.shape)

    def _model(self, layers: int) -> torch.nn.Module:
        args = argparse.Namespace(**{**vars(self.args), "num_layers": layers})
        return build.build_model(args, augtree=True, seed=1).to(self.device)

    def _memory(self, seconds: float) -> fit.Fit:
        bench, model = self.bench, self.models[-1]
        timers = {(n,): bench.step(model, n) for n in self.sizes.peak_rows}
        base = cluster_of("cpu").base_bytes  # what the planner added to its prediction
        predicted = [timer.predicted_bytes - base for timer in timers.values()]
        cases = {key: lambda timer=timer: (bench.peak(timer),) for key, timer in timers.items()}
        found = bench.curve("memory", cases, seconds)
        curve = self._curve("peak bytes", [(key, peak[0]) for key, peak in found.items()])
        fitted, ratio = fit.fit_memory(curve, predicted)
        self.notes["bytes_a_row_measured_by_predicted"] = round(ratio, 3)
        return fitted

    # What needs no curve.

    def _given(self) -> None:
        cuda = self.device.type == "cuda"
        on_node = torch.cuda.device_count() if cuda else max(self.world, os.cpu_count() or 1)
        several = self.world > self.local_ranks
        memory = torch.cuda.mem_get_info(self.device)[1] if cuda else _host_memory() // self.local_ranks
        memory = int(self.bench.transport.total(torch.tensor(memory), "min"))  # nodes may differ
        name = torch.cuda.get_device_name(self.device) if cuda else "CPU"
        copied = self.bench.curve("host", {(): self.bench.host_copy()}, 0.0)[()][0] if cuda else 0.0
        self.values |= {
            "name": f"calibrated: {name}, {self.world} ranks",
            "node_ranks": self.local_ranks if several else on_node,
            "memory_bytes": memory * _ACTIVATIONS_PCT // 100,
            "host_bytes_s": fit.whole("host_bytes_s", 1e9 / copied) if cuda else 0,
        }

    def _measured(self) -> dict[str, Any]:
        """What the file says of how it was made."""
        return {
            "how": f"megatron_augtree.tools.calibrate, {time.time() - self.began:.0f} s",
            "machine": machine(),
            "device": self.values["name"],
            "ranks": self.world,
            "nodes": self.world // self.local_ranks,
            "torch": torch.__version__,
            "megatron_core": version("megatron-core"),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "model": self.sizes.model,
            "held_out_error_pct": self.errors,
            "rounds": self.bench.rounds,
            **self.notes,
            "curves": self.curves,
        }

    def _say(self, name: str, found: fit.Fit, seconds: float) -> None:
        if self.rank == 0:
            values = ", ".join(
                f"{key} {value if isinstance(value, bool) else f'{value:,}'}"
                for key, value in found.values.items()
            )
            error = f"; {self.errors[name]} % off on held-out sizes" if name in self.errors else ""
            rounds = f"; {self.bench.rounds[name]} rounds" if name in self.bench.rounds else ""
            print(f"{name:8} {values}{error}{rounds}; {seconds:.0f} s", file=sys.stderr, flush=True)


def _model_arguments(flags: str, layers: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args([*flags.split(), "--num-layers", str(layers)])


def _check_devices(device: str) -> None:
    cards, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "cuda" and ranks > cards:
        raise InputError(
            "cannot calibrate",
            values=f"--device cuda, {ranks} ranks of a node, {cards} devices",
            rule="every rank of a node has a device of its own",
            remedy="start fewer ranks, or calibrate the CPU with --device cpu",
        )


def _join(args: argparse.Namespace, device: torch.device) -> None:
    """Process group, parallel state and seeds: gloo with the shims, or NCCL."""
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        build.initialize(args)
        return
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)


def _host_memory() -> int:
    """Memory of this machine, or of the container that this process is in, bytes."""
    found = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # none, or no limit
            continue
    return min(found)
