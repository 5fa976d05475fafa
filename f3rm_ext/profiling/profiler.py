"""Records what the memory of a training run is made of: peaks by phase at every step, tensors at some."""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from f3rm_ext.errors import reason_of
from f3rm_ext.profiling import memory
from f3rm_ext.profiling.census import storage_key, take_census
from f3rm_ext.profiling.device import drivers_spill, judge_spill, start_sampler
from f3rm_ext.profiling.findings import doubts, findings
from f3rm_ext.profiling.profile_file import FORMAT, ProfileWriter
from f3rm_ext.profiling.snapshot import Snapshot, tensor_totals

Phase = Literal["train", "densify", "finish", "evaluation", "viewer", "between steps"]
"""Parts of a run that have peaks of their own. Densify is what follows the optimiser's step of splats, and finish what
follows the last one: cleaning and lifting features. Viewer is what happens between steps while a viewer is on, and
between steps without one: saving, mostly."""


class Parts(NamedTuple):
    """What a run consists of now; densification replaces parameters."""

    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    datamanager: object
    memory_options: list[dict[str, str]]
    """See :class:`~f3rm_ext.profiling.snapshot.Snapshot`."""


class SavedTensors:
    """The activations of a step: bytes of the tensors that autograd has saved, each storage once.

    Tensors that functions keep by other means than ``save_for_backward`` are not seen.

    Args:
        known: tensors that do not count, since they exist anyway, such as parameters.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._sizes = {storage_key(tensor): 0 for tensor in known}

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(self._sizes.values())

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts what is saved inside the ``with`` block. Values are not changed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key is not None and key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes()
        return tensor


class TensorProfiler:
    """Writes a profile: see :mod:`f3rm_ext.profiling.profile_file`. A disk that is full ends the profile, not the run.

    Args:
        parts: returns the parts of the run; called for every snapshot.
        last_step: gets a snapshot too.
        about: entries for the start of the file.
        publish: passes scalars on to TensorBoard, by tag; with the step.
        between: phase that peaks between steps belong to.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        parts: Callable[[], Parts],
        *,
        every: int,
        last_step: int,
        about: Mapping[str, Any],
        say: Callable[[str], None],
        publish: Callable[[dict[str, float], int], None],
        between: Phase = "between steps",
    ) -> None:
        self.device, self.every, self.last_step = device, every, last_step
        self.snapshots: list[Snapshot] = []
        self._parts, self._say, self._publish = parts, say, publish
        self._between: Phase = between
        self._said: set[str] = set()
        self._peaks: dict[str, dict[str, int]] = {}
        self._highest = 0
        self._saved: SavedTensors | None = None
        self._spills = device.type == "cuda" and drivers_spill()
        self._open = ExitStack()
        self._sampler, problem = start_sampler(device)
        if problem:
            self._say_once("nvml", problem)
        self._open.enter_context(memory.observed_resets(self._observe))
        if self._sampler is not None:
            self._open.callback(self._sampler.close)
        self._writer: ProfileWriter | None = None
        self._began = time.monotonic()
        try:
            self._writer = ProfileWriter(path)
        except OSError as error:
            self._stop_writing(error)
        self._write(
            "start",
            {
                "format": FORMAT,
                "device": device.type,
                "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
                "device_total": memory.total_bytes(device),
                "resident": memory.resident_bytes(),
                "torch": torch.__version__,
                "began": time.time(),
                "every": every,
                **about,
            },
        )

    # --- phases ------------------------------------------------------------------------------------------------------

    def ends(self, phase: Phase) -> None:
        """Says that a phase ends here; the peak since the last one belongs to it."""
        memory.reset_peak(self.device)
        peaks = self._peaks.setdefault(phase, {})
        peaks["tensors"] = max(peaks.get("tensors", 0), self._highest)
        self._highest = 0
        if self._sampler is not None:
            peaks["device"] = max(peaks.get("device", 0), self._sampler.take_peak())

    def step_pre_backward(self) -> None:
        """Begins a training step; the trainer calls it before the step."""
        self.ends(self._between)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measures the forward and backward pass and the optimiser's step."""
        if not self._is_due(step):
            yield
            return
        model = self._parts().model
        self._saved = SavedTensors([*model.parameters(), *model.buffers()])
        with self._saved.count():
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measures an evaluation between steps."""
        self.ends(self._between)
        yield
        self.ends("evaluation")

    def step_post_backward(self, step: int) -> None:
        """To be called after a training step; takes a snapshot if one is due."""
        if self._is_due(step):
            self._take(step)

    def close(self, reason: str) -> None:
        """Ends the profile.

        Args:
            reason: "finished", or why the run ended before.
        """
        self._write("end", {"reason": reason})
        self._open.close()
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _observe(self, device: torch.device) -> None:
        """Notes the peak before anyone resets it, so that a model's own measurements hide none."""
        self._highest = max(self._highest, memory.peak_bytes(self.device))

    def _is_due(self, step: int) -> bool:
        return not self.snapshots or step % self.every == 0 or step == self.last_step

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _take(self, step: int) -> None:
        began = time.perf_counter()
        parts = self._parts()
        state = memory.allocator_state(self.device)
        census = take_census(parts.model, parts.optimizers, parts.datamanager)
        totals = tensor_totals(census, self.device.type)
        used = None if self._sampler is None else self._sampler.now
        reserved = state.reserved if state else 0
        spill, spilled = judge_spill(used, reserved, self._spills)
        snapshot = Snapshot(
            step=step,
            seconds=round(time.monotonic() - self._began, 3),
            **totals,
            activations=self._saved.bytes if self._saved else 0,
            resident=memory.resident_bytes(),
            **({} if state is None else asdict(state)),
            device_used=used.used if used else None,
            device_total=used.total if used else None,
            phases=self._peaks,
            spill=spill,
            spilled=spilled,
            memory_options=parts.memory_options,
        )
        self._saved, self._peaks = None, {}
        snapshot = replace(
            snapshot,
            suspect=doubts(snapshot, self.device.type == "cuda"),
            cost_ms=round(1000 * (time.perf_counter() - began), 2),
        )
        self.snapshots.append(snapshot)
        self._write("snapshot", asdict(snapshot))
        self._publish(scalars(snapshot), step)
        for finding in findings(self.snapshots):
            self._say_once(finding.kind, finding.text)
        if self._sampler is not None and self._sampler.problem:
            self._say_once("nvml", f"The memory of the whole GPU is no longer recorded: {self._sampler.problem}.")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(kind, dict(content))
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
        self._writer = None
        self._say_once("writing", f"The profile of the tensors ends here, training goes on: {reason_of(error)}.")


def scalars(snapshot: Snapshot) -> dict[str, float]:
    """Returns what TensorBoard shows of a snapshot, by tag below ``TensorProfiling/``.

    MB are 2^20 bytes, as in nerfstudio's "GPU Memory (MB)".
    """
    values: dict[str, float] = {
        f"Tensor_Category/{name}_MB": size / memory.MIB for name, size in snapshot.categories.items()
    }
    values["Tensor_Category/activations_MB"] = snapshot.activations / memory.MIB
    values["Tensors/count"] = snapshot.tensors
    values["Large_Tensors/count"] = snapshot.large
    values["Process/resident_MB"] = snapshot.resident / memory.MIB
    if snapshot.reserved is not None:
        values["Allocator/allocated_MB"] = (snapshot.allocated or 0) / memory.MIB
        values["Allocator/reserved_MB"] = snapshot.reserved / memory.MIB
        values["Allocator/gaps_MB"] = (snapshot.gaps or 0) / memory.MIB
        values["Allocator/cache_MB"] = snapshot.cache / memory.MIB
    values["fragmentation_percent"] = snapshot.fragmentation_percent
    for phase, peaks in snapshot.phases.items():
        values |= {f"Peak/{phase.replace(' ', '_')}_{of}_MB": size / memory.MIB for of, size in peaks.items()}
    return values
