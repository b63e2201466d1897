"""Load a checkpoint: plan, agree, read, prepare, build; on one process or on every rank of a job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Literal

import torch
from torch import nn

from steelyard.agree import Agreement, Verdict
from steelyard.collectives import Groups, current_ranks, groups_of, is_initialized
from steelyard.config import LoadConfig, resolve
from steelyard.errors import CapabilityError, ConfigError, LoadError
from steelyard.execute import Executed, Executor, blamed
from steelyard.loadplan import LoadPlan
from steelyard.planning import plan_for
from steelyard.ranks import Ranks
from steelyard.registry import Registry, default_registry
from steelyard.report import LoadReport
from steelyard.reporting import report_of
from steelyard.target import CPU, this_machine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        module: The runnable model, in evaluation mode.
        report: What the load did.
        plan: What it was to do.
    """

    module: nn.Module
    report: LoadReport
    plan: LoadPlan


def load(
    path: str | PathLike[str],
    *,
    device: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    tp: int | None = None,
    ep: int | None = None,
    moe_tp: int | None = None,
    config: LoadConfig | None = None,
    registry: Registry | None = None,
) -> LoadedModel:
    """Load a checkpoint; under ``torch.distributed``, called on every rank alike.

    Args:
        path: The checkpoint's folder, or a hub id that is in the local cache.
        device: ``"cpu"``, ``"cuda"``; the first accelerator if there is one, if not given.
        dtype: Dtype of the parameters that are not quantized; the checkpoint's if not given.
        tp: Tensor-parallel size; all ranks of the job if not given.
        ep: Expert-parallel size.
        moe_tp: Tensor-parallel size inside an expert.
        config: Every other option.
        registry: Plugins to look in; those installed if not given.
    Raises:
        SteelyardError: on one process, what is wrong, as `steelyard.plan` says it, or `LoadError` for bytes that
            contradict the plan.
        DistributedLoadError: on several ranks, the same error on all of them, naming the rank that failed.
    """
    started = time.perf_counter()
    registry = registry if registry is not None else default_registry()
    overrides = {"device": device, "dtype": dtype, "tp": tp, "ep": ep, "moe_tp": moe_tp}
    asked = resolve(config, overrides=overrides).config
    ranks = job_of(asked)
    times = asked.agreement
    with Agreement.open(ranks, bound=times.timeout, heartbeat=times.heartbeat) as agreement:
        place = device_of(asked.device)
        made = plan_for(path, config, overrides, registry, job=ranks, device=str(place)).check()
        _agree(made, str(place), agreement)
        groups = groups_of(ranks)  # a collective: it stands where every rank is known to be well
        reading = time.perf_counter()
        model, executed, read = _execute(made, groups, ranks.rank, place, agreement)
        reading = time.perf_counter() - reading
        agreement.settle("loaded", Verdict())
    seconds = time.perf_counter() - started
    report = report_of(made, executed, read, ranks.rank, str(place), reading=reading, seconds=seconds)
    _log.info("%s", report.summary())
    return LoadedModel(model, report, made)


def job_of(options: LoadConfig) -> Ranks:
    """Return this process's place in the job.

    Raises:
        ConfigError: the sizes do not fit the job, or this is one of several processes that torchrun started and
            torch.distributed is not initialised, so that each would load the whole model unasked.
    """
    ranks = current_ranks(tp=options.tp, ep=options.ep, moe_tp=options.moe_tp)
    started = os.environ.get("WORLD_SIZE", "1")
    if ranks.world == 1 and options.tp is None and started not in ("", "1") and not is_initialized():
        raise ConfigError(
            f"WORLD_SIZE={started}, but torch.distributed is not initialised in this process; call "
            "torch.distributed.init_process_group before the load, or say tp=1 to load the whole model in each process"
        )
    return ranks


def device_of(device: str | None) -> torch.device:
    """Return the device to load to, with this process's index for an accelerator.

    Args:
        device: What was asked for; the accelerator if there is one, else the CPU, if nothing was.
    Raises:
        ConfigError: the device is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else CPU
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {error}") from error
    if found.type == CPU:
        return found
    if found.type != "cuda":
        raise ConfigError(f"device={device!r}: weights go to cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no accelerator here; use device='cpu'")
    index = found.index if found.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: index {index} of {torch.cuda.device_count()} accelerators here")
    return torch.device("cuda", index)


def _agree(made: LoadPlan, device: str, agreement: Agreement) -> None:
    """Go on only if this rank can run the plan and every rank made the same one."""
    here = this_machine(device)
    if made.target != here:
        raise ConfigError(
            f"target={made.target!r}: this machine is {here!r}; a plan for another can be made, not loaded"
        )
    missing = {one.backend: one.missing for one in made.kernels() if one.missing}
    if missing:
        raise CapabilityError("run the kernels that were chosen", missing)
    _log.info("%s", made.effective.describe())
    choices = {f"{one.stem} {' '.join(one.parts)}".strip(): f"{one.backend} {one.form}" for one in made.kernels()}
    agreement.settle("plan", Verdict(digest=made.digest, choices=choices))


def _execute(
    made: LoadPlan, groups: Groups, rank: int, device: torch.device, agreement: Agreement
) -> tuple[nn.Module, Executed, int]:
    way, _ = made.reader
    with made.load_format[1].open(made.checkpoint, way) as reader:
        executor = Executor(made, rank, device, reader, groups, agreement.poll)
        executed = executor.run()
        read = reader.bytes_read
    built = Built(executed.built)
    offer = made.offers["model", made.family_key]
    with blamed(f"{made.family_key}: the model of {offer.distribution} {offer.version}".rstrip()):
        module = made.family.module(made.config, built)
    if not isinstance(module, nn.Module):
        raise LoadError(f"{made.family_key}: the family's model is a {type(module).__name__}, not an nn.Module")
    built.check()
    return module.eval(), executed, read


class Built(Mapping[str, nn.Module]):
    """Built nodes by stem; each may be taken once, and all must be."""

    def __init__(self, nodes: Mapping[str, nn.Module]) -> None:
        self._nodes = dict(nodes)
        self._taken: set[str] = set()

    def __getitem__(self, stem: str) -> nn.Module:
        node = self._nodes[stem]
        if stem in self._taken:
            raise LoadError(f"the family took the node {stem!r} twice; two places of a model may not own one module")
        self._taken.add(stem)
        return node

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, stem: object) -> bool:
        return stem in self._nodes

    def check(self) -> None:
        """Raise LoadError if the family left out a node that was loaded."""
        left = [stem for stem in self._nodes if stem not in self._taken]
        if left:
            raise LoadError(f"the family left out {len(left)} loaded nodes, such as {left[0]!r}")
