"""Load a checkpoint into a torch module that is there already: made on ``meta``, or with weights of its own."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

import torch
from torch import nn

from steelyard.checkpoint import Checkpoint, quantization_config
from steelyard.config import Effective, LoadConfig, resolve
from steelyard.errors import (
    BadConfig,
    CapabilityError,
    ConfigError,
    LoadError,
    PlanError,
    UnknownPlugin,
)
from steelyard.findings import errors_of
from steelyard.into.copies import Copies, Wanted, by_family, by_name
from steelyard.into.fill import Filler
from steelyard.into.held import ModuleState, materialise, state_of
from steelyard.into.rebuild import Rebuild, make_again
from steelyard.loader import device_of
from steelyard.loadplan import way_to_read
from steelyard.planning import find_family, format_of, plan_for
from steelyard.protocols import LoadFormat
from steelyard.ranks import Ranks
from steelyard.registry import Registry, default_registry
from steelyard.report import LoadReport, ParameterRecord, RankBytes, TensorRange, TieRecord
from steelyard.target import CPU, this_machine

__all__ = ["LoadedInto", "Rebuild", "load_into"]

OPTIONS = ("device", "load_format", "reader", "prefer", "strict", "strict_plugins", "allow_missing")
"""Options that mean something here; the others speak of ranks, kernels and dtypes, which the module has decided."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedInto:
    """A module whose every weight is from the checkpoint.

    Attributes:
        module: The module that was given.
        report: Which bytes of which file went where; its parameters are the module's own tensors.
        family: Key of the model family whose mapping served; empty if names were compared as they stand.
        rebuilt: Tensor that the state dict leaves out to the way that made its value.
    """

    module: nn.Module
    report: LoadReport
    family: str
    rebuilt: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is copied from where, and what the report says of it."""

    checkpoint: Checkpoint
    copies: Copies
    load_format: tuple[str, LoadFormat]
    effective: Effective
    plugins: Mapping[str, str]
    digest: str
    family: str = ""
    skipped: tuple[str, ...] = ()


def load_into(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    device: str | None = None,
    config: LoadConfig | None = None,
    rebuild: Mapping[str, Rebuild] | None = None,
    registry: Registry | None = None,
) -> LoadedInto:
    """Load a checkpoint into a module, whole and in this process alone.

    Every element of every parameter and persistent buffer is written exactly once, in the dtype that it has there, or an
    error says why not. Where the checkpoint's model family is installed, its mapping finds the module's tensors too, so
    that stacked experts are filled from a file that stores each; else names and shapes must be equal. Training mode and
    ``requires_grad`` stay as they are, and so do buffers outside the state dict that are not on ``meta``.

    Args:
        module: What to fill. Tensors on ``meta`` get memory, poisoned until it is written; others are filled in place.
        path: The checkpoint's folder, or a hub id that is in the local cache.
        device: Where tensors on ``meta`` go: ``"cpu"``, the default, or ``"cuda"``.
        config: Every other option; those about ranks, kernels and dtypes are refused.
        rebuild: Name of a tensor outside the state dict, or a pattern with ``*`` for any run, to a function that gets the
            module which owns it and returns its value; for those on ``meta`` that the module's own code does not make.
        registry: Plugins to look in; those installed if not given.
    Raises:
        PlanError: checkpoint and module do not fit; with everything that is wrong, before a tensor is read.
        CapabilityError: the checkpoint is quantized.
        LoadError: bytes could not be read, or contradict the module; it says whether weights were written.
        SteelyardError: as `steelyard.plan` does.
    """
    started = time.perf_counter()
    registry = registry if registry is not None else default_registry()
    with torch.device(CPU):  # nearer than a `with torch.device("meta")` around the call, which readers must not follow
        place = device_of(_checked(config, device).device or CPU)
        target = this_machine(str(place))
        state = state_of(module)
        planned = _plan(path, config, str(place), state, registry)
        made = make_again(module, state.hidden, rebuild or {})
        findings = tuple(dict.fromkeys((*state.findings, *planned.copies.findings, *made.findings)))
        errors = errors_of(findings)
        if errors:
            folder, asked = str(planned.checkpoint.folder), f"into a {type(module).__qualname__}"
            raise PlanError(folder, errors, asked=asked)
        way, why = way_to_read(planned.effective.config.reader, target)
        reading = time.perf_counter()
        filler, read = _fill(planned, state, made.values, place, way)
        reading = time.perf_counter() - reading
    rank = RankBytes(0, sum(filler.received.values()), read, reading, 0, filler.largest)
    report = LoadReport(
        checkpoint=str(planned.checkpoint.folder),
        digest=planned.digest,
        target=target,
        device=str(place),
        dtype=_main_dtype(state),
        load_format=planned.load_format[0],
        reader=way,
        reader_reason=why,
        parameters=tuple(_parameters(planned, state)),
        ranks=(rank,),
        ties=tuple(TieRecord(name, one.names[0], True) for one in state.held for name in one.names[1:]),
        dropped=planned.copies.dropped,
        skipped=planned.skipped,
        findings=findings,
        options=planned.effective.to_json(),
        plugins=planned.plugins,
        seconds=time.perf_counter() - started,
    )
    _log.info("%s", report.summary())
    return LoadedInto(module, report, planned.family, made.how)


def _checked(config: LoadConfig | None, device: str | None) -> LoadConfig:
    """Return the options; raise ConfigError if one was set that means nothing here."""
    useless = [name for name in (config.given() if config is not None else ()) if name not in OPTIONS]
    if useless:
        raise ConfigError(
            f"{', '.join(useless)} of LoadConfig cannot be met by load_into, which fills one whole module in the dtypes that "
            f"it has; leave them out. It takes {', '.join(OPTIONS)}"
        )
    return resolve(config, overrides={"device": device}).config


def _plan(
    path: str | PathLike[str], config: LoadConfig | None, device: str, state: ModuleState, registry: Registry
) -> _Planned:
    """Plan the copies by the model family's mapping, or by name if there is none for the config."""
    checkpoint = Checkpoint.open(path)
    quantization = quantization_config(checkpoint)
    if quantization is not None:
        stated, source = quantization
        method = stated.get("quant_method", "a method without a name")
        why = f"quantized by {method}, and load_into fills plain floats only; use steelyard.load, or a plain checkpoint"
        raise CapabilityError(f"load {checkpoint.folder} into a module", {source: why})
    wanted = Wanted(state.entries, {name: one.names[0] for one in state.held for name in one.names})
    effective = resolve(config)
    options = effective.config
    registry = registry.under(prefer=options.prefer, strict_plugins=options.strict_plugins)
    try:
        find_family(checkpoint.config, registry)
    except (UnknownPlugin, BadConfig) as error:
        copies = by_name(checkpoint, wanted, str(error), strict=options.strict)
        load_format = format_of(options, checkpoint, registry)
        offer = registry.offer("load format", load_format[0])
        said = json.dumps([checkpoint.identity(), checkpoint.config_bytes_hash])
        digest = hashlib.sha256(said.encode()).hexdigest()
        return _Planned(checkpoint, copies, load_format, effective, {offer.distribution: offer.version}, digest)
    plan = plan_for(path, config, {}, registry, job=Ranks.of(), device=device)
    return _Planned(
        plan.checkpoint, by_family(plan, wanted, registry), plan.load_format, plan.effective, plan.plugins, plan.digest,
        plan.family_key, plan.skipped,
    )  # fmt: skip


def _fill(
    planned: _Planned, state: ModuleState, values: Mapping[str, torch.Tensor], place: torch.device, way: str
) -> tuple[Filler, int]:
    """Give memory to what is on ``meta`` and fill the module; return what was done and the bytes read from files."""
    files = [file.name for file in planned.checkpoint.files]
    filler = Filler({name: one for one in state.held for name in one.names}, files)
    with _told(filler, state):
        materialise(state, values, place)
        with planned.load_format[1].open(planned.checkpoint, way) as reader:
            filler.run(planned.copies.copies, reader)
    return filler, reader.bytes_read


@contextmanager
def _told(filler: Filler, state: ModuleState) -> Iterator[None]:
    """Let every error say what has become of the module's weights."""
    try:
        yield
    except BaseException as error:
        started = len(filler.started)
        told = f"no weight was written; what was on meta is poisoned or still there ({len(state.held)} tensors)"
        if started:
            told = (
                f"the module's weights are not usable: {started} of its {len(state.held)} tensors were written to, the others "
                "hold poison or what they held before; load again, or make the module anew"
            )
        if isinstance(error, Exception):
            raise LoadError(f"{error}\n{told}") from error
        error.add_note(told)
        raise


def _parameters(planned: _Planned, state: ModuleState) -> Iterator[ParameterRecord]:
    files, entries = planned.checkpoint.files, planned.checkpoint.entries
    for copy in planned.copies.copies:
        read, name = copy.read, copy.place.name
        if copy.is_compared:
            continue
        if read is None:
            yield ParameterRecord(name, "", "fill", f"value = {copy.value:g}")
            continue
        entry = entries[read.name]
        place = TensorRange(read.name, files[read.file].name, entry.start, entry.stop)
        how = "by name" if read.stem == name else f"by the mapping of {planned.family}"
        yield ParameterRecord(name, read.part, "layout", how, (place,), expert=read.expert)
    for one in state.held:
        for name in one.names[1:]:
            yield ParameterRecord(name, "", "alias", one.names[0])


def _main_dtype(state: ModuleState) -> str:
    """Return the code of the dtype that most of the module's elements have."""
    sizes: Counter[str] = Counter()
    for one in state.held:
        sizes[one.code] += one.tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else ""
