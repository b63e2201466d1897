"""From a checkpoint's headers to a `LoadPlan`: one pass, no way back up, no tensor read.

The order is that of the journey: family, blueprint, names, schemes, layouts, local nodes, kernels, cuts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from steelyard.blueprint import Node
from steelyard.checkpoint import Checkpoint, quantization_config
from steelyard.config import Effective, LoadConfig, resolve
from steelyard.discovery import Offer
from steelyard.dtypes import CONFIG_DTYPES
from steelyard.errors import BadConfig, CapabilityError, ConfigError, CutError, SteelyardError, UnknownPlugin
from steelyard.findings import Finding, Severity
from steelyard.kinds import KindName
from steelyard.loadplan import LoadPlan
from steelyard.local import localize
from steelyard.matching import Matcher
from steelyard.names import Names, dropped
from steelyard.parts import PartFinder
from steelyard.protocols import Config, KernelBackend, LoadFormat, ModelFamily, QuantConfig
from steelyard.ranks import Ranks
from steelyard.registry import Registry, default_registry
from steelyard.segmenting import Segmenter
from steelyard.steps import Alias, AliasIfEqual
from steelyard.target import check_target, has_torch, this_machine
from steelyard.tasks import PlannedNode

NOT_IN_DIGEST = {"device", "reader", "agreement", "target", "load_format", "tp", "ep", "moe_tp"}
"""Options that may differ between ranks, or stand in the digest in their decided form."""


def plan(
    path: str | PathLike[str],
    *,
    tp: int | None = None,
    ep: int | None = None,
    moe_tp: int | None = None,
    world: int | None = None,
    target: str | None = None,
    config: LoadConfig | None = None,
    registry: Registry | None = None,
) -> LoadPlan:
    """Plan the load of a checkpoint from its headers alone; torch is not needed.

    Args:
        path: The checkpoint's folder, or a hub id that is in the local cache.
        tp: Tensor-parallel size.
        ep: Expert-parallel size.
        moe_tp: Tensor-parallel size inside an expert.
        world: Ranks of the job; the smallest that holds ``tp`` and ``ep`` if not given.
        target: What it shall run on (``"sm_90"``, ``"gfx942"``, ``"cpu"``); this machine if not given.
        config: Every other option.
        registry: Plugins to look in; those installed if not given.
    Returns:
        The plan. What is wrong with the checkpoint stands in its ``findings``; ``plan.check()`` raises it.
    Raises:
        CheckpointError: the folder cannot be read as a checkpoint.
        UnknownPlugin: no installed plugin knows the architecture or the quantization.
        BrokenPlugin: the plugin that knows it cannot be imported.
        ConfigError: an option, or a value of the model's config, cannot be met.
    """
    registry = registry if registry is not None else default_registry()
    return plan_for(path, config, {"tp": tp, "ep": ep, "moe_tp": moe_tp, "target": target}, registry, world=world)


def plan_for(
    path: str | PathLike[str],
    config: LoadConfig | None,
    overrides: Mapping[str, Any],
    registry: Registry,
    *,
    world: int | None = None,
    job: Ranks | None = None,
    device: str | None = None,
) -> LoadPlan:
    """Plan a load for a job that is known, or for the sizes that the options name.

    Args:
        path: The checkpoint's folder, or a hub id.
        config: Options.
        overrides: Options that go before ``config``.
        registry: Plugins to look in.
        world: Ranks of the job, if ``job`` is not given.
        job: The job's sizes.
        device: The device that the load will use, if it is decided already.
    Raises:
        SteelyardError: as `plan` does.
    """
    asked = resolve(config, overrides=overrides).config
    registry = registry.under(prefer=asked.prefer, strict_plugins=asked.strict_plugins)
    checkpoint = Checkpoint.open(path)
    key, family = find_family(checkpoint.config, registry)
    effective = resolve(config, overrides=overrides, defaults=family.defaults(checkpoint.config), family=key)
    options = effective.config
    if job is None:
        job = Ranks.of(tp=options.tp or 1, ep=options.ep or 1, moe_tp=options.moe_tp, world=world)
    here = this_machine(device if device is not None else options.device)
    return _plan(checkpoint, key, family, effective, registry, job, here)


def find_family(config: Config, registry: Registry) -> tuple[str, ModelFamily]:
    """Return the family for a config, by ``architectures`` and then ``model_type``.

    Raises:
        BadConfig: the config names neither.
        UnknownPlugin: no installed plugin offers any of the names.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise BadConfig("config.json", f"architectures={architectures!r} is not a list of names")
    keys = [name for name in architectures if isinstance(name, str)]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type:
        keys.append(model_type)
    if not keys:
        raise BadConfig("config.json", "names no architecture: it has neither 'architectures' nor 'model_type'")
    models = registry["model"]
    unknown: list[UnknownPlugin] = []
    for key in keys:
        try:
            return key, models[key]()
        except UnknownPlugin as error:
            unknown.append(error)
    hint = next((error.hint for error in unknown if error.hint), None)
    blocked = dict.fromkeys(name for error in unknown for name in error.blocked)
    raise UnknownPlugin("model", keys[0], models.list_keys(), hint, broken=unknown[0].broken, blocked=tuple(blocked))


def find_quantization(checkpoint: Checkpoint, registry: Registry) -> tuple[str, QuantConfig] | None:
    """Return the dialect's key and the parsed quantization config of a checkpoint; None if it has none.

    Raises:
        BadConfig: it names no method.
        UnknownPlugin: no installed plugin knows the dialect.
    """
    found = quantization_config(checkpoint)
    if found is None:
        return None
    config, source = found
    named = config.get("quant_method")
    inner = config.get("quantization")  # hf_quant_config.json has it one level down
    if not named and ("quant_algo" in config or (isinstance(inner, Mapping) and "quant_algo" in inner)):
        named = "modelopt"
    if not isinstance(named, str):
        raise BadConfig(source, f"its quantization config names no quant_method; keys: {', '.join(sorted(config))}")
    key = named.strip().lower()
    key = "compressed-tensors" if key == "compressed_tensors" else key
    return key, registry["quant dialect"][key]().parse(config, checkpoint.side_files())


def _plan(
    checkpoint: Checkpoint,
    key: str,
    family: ModelFamily,
    effective: Effective,
    registry: Registry,
    job: Ranks,
    here: str,
) -> LoadPlan:
    options, config = effective.config, checkpoint.config
    target = check_target(options.target or here)
    dtype = checkpoint.dtype_hint() if options.dtype == "auto" else CONFIG_DTYPES[options.dtype]
    publishers = _publishers(config, registry)
    quantization = find_quantization(checkpoint, registry)
    with _asking(key):
        names = Names([family.mapping(config), *publishers.values()])
    asked = f"tp_size={job.tp}, ep_size={job.ep}, moe_tp={job.moe_tp}"
    matcher = Matcher(checkpoint.entries, [file.name for file in checkpoint.files], asked)
    finder = PartFinder(checkpoint, names, quantization[1] if quantization else None, registry, options, matcher)

    with _asking(key):
        blueprint = family.blueprint(config)
    aliased, ties = finder.ties(blueprint.nodes, blueprint.ties)
    found = [parts for node in blueprint.nodes if node.stem not in aliased and (parts := finder.find(node))]
    matcher.report_unread_parts()
    backends, unusable = _backends(options, registry)
    segmenter = Segmenter(backends, options, job, target, dtype, here=target == here and has_torch())
    nodes = tuple(PlannedNode(parts.node, segmenter.class_of(parts), parts.units) for parts in found)
    reasons, unexpected = _leftovers(matcher, names.drops(config), strict=options.strict)

    findings = [*matcher.findings, *finder.findings, *unexpected, *_unlike(ties, blueprint.nodes, job, options)]
    findings += [Finding("config", "note", "config.json", note) for note in blueprint.notes]
    findings += _stated_dtype(options, config, dtype)
    findings += segmenter.findings(Counter(one.cls for one in nodes))
    findings += quantization[1].findings() if quantization else ()
    findings += unusable
    load_format = format_of(options, checkpoint, registry)
    used: list[tuple[KindName, str]] = [("model", key), ("load format", load_format[0])]
    used += [("weight mapping", name) for name in publishers]
    used += [("quant dialect", quantization[0])] if quantization else []
    used += [("quant method", name) for name in finder.methods]
    used += [("kernel backend", name) for name in segmenter.chosen]
    offers: dict[tuple[str, str], Offer] = {(noun, name): registry.offer(noun, name) for noun, name in used}
    return LoadPlan(
        checkpoint=checkpoint,
        config=config,
        family=family,
        family_key=key,
        job=job,
        target=target,
        dtype=dtype,
        nodes=nodes,
        ties=ties,
        aliased={node.stem: node for node in blueprint.nodes if node.stem in aliased},
        methods=finder.methods,
        backends={name: backends[name] for name in segmenter.chosen},
        dropped=reasons,
        skipped=tuple(finder.skipped),
        findings=tuple(dict.fromkeys(findings)),
        effective=effective,
        load_format=load_format,
        offers=offers,
        digest=_digest(checkpoint, job, target, dtype, effective, offers.values(), nodes),
    )


def _stated_dtype(options: LoadConfig, config: Config, dtype: str) -> list[Finding]:
    """Return a note if the config states a dtype that no model is loaded in, so that the file's was taken."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if options.dtype != "auto" or not isinstance(stated, str) or stated in (*CONFIG_DTYPES, "auto"):
        return []
    text = f"config.json states dtype {stated}, which models are not loaded in; {dtype}, as stored, is taken"
    return [Finding("config", "note", "config.json", text)]


@contextmanager
def _asking(key: str) -> Iterator[None]:
    """Tell what a family stumbles over in the config as a fault of the config."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, SteelyardError):
            raise
        raise ConfigError(
            f"config.json: the model family {key!r} cannot use it: {type(error).__name__}: {error}"
        ) from error


def _publishers(config: Config, registry: Registry) -> Mapping[str, Any]:
    """Return the installed mappings of further publishers, ``<model_type>.<publisher>``, made."""
    mappings = registry["weight mapping"]
    wanted = [key for key in mappings.list_keys() if key.rpartition(".")[0] == config.get("model_type")]
    return {key: mappings[key]() for key in wanted}


def _backends(options: LoadConfig, registry: Registry) -> tuple[Mapping[str, KernelBackend], list[Finding]]:
    """Return the kernel backends to ask; one that cannot be imported is an error only if the user names it."""
    if options.kernels is not None:
        backends = registry["kernel backend"]
        return {key: backends[key]() for key in options.kernels}, []
    usable = {key: cls() for key, cls in registry.available("kernel backend")}
    broken = [
        Finding("plugin", "note", name, f"kernel backend {name} is installed but could not be used: {why}")
        for (noun, name), why in registry.import_errors.items()
        if noun == "kernel backend"
    ]
    return usable, broken


def _unlike(
    ties: Iterable[Alias | AliasIfEqual], nodes: Iterable[Node], job: Ranks, options: LoadConfig
) -> list[Finding]:
    """Return a finding for every tie whose two nodes a rank holds different pieces of."""
    by_stem = {node.stem: node for node in nodes}
    findings = []
    for tie in ties:
        try:
            for ranks in job.all():
                mine, theirs = (
                    localize(by_stem[stem], ranks, experts=options.experts, vocab_padding=options.vocab_padding)[0]
                    for stem in (tie.target, tie.source)
                )
                pieces = [([part.out for part in one.parts], one.inner, one.padding) for one in (mine, theirs)]
                if pieces[0] != pieces[1]:
                    findings.append(
                        Finding(
                            "shape",
                            "error",
                            tie.target,
                            f"{tie.target} is tied to {tie.source}, but rank {ranks.rank} holds [{mine.n}, {mine.k}] of "
                            f"one and [{theirs.n}, {theirs.k}] of the other",
                        )  # fmt: skip
                    )
                    break
        except CutError as error:
            findings.append(Finding("cut", "error", tie.target, f"{tie.target}: {error}"))
        except ConfigError as error:
            findings.append(Finding("config", "error", tie.target, f"{tie.target}: {error}"))
    return findings


def _leftovers(matcher: Matcher, drops: Any, *, strict: bool) -> tuple[Mapping[str, str], list[Finding]]:
    """Return the tensors that a rule drops, and a finding for each that nothing uses."""
    left = [name for name in matcher.entries if name not in matcher.claims and name not in matcher.blamed]
    reasons = dropped(left, drops)
    severity: Severity = "error" if strict else "note"
    unexpected = [
        Finding(
            "unexpected",
            severity,
            name,
            f"unexpected tensor {name} ({matcher.file_of(name)}): no rule of the model uses or drops it",
        )  # fmt: skip
        for name in left
        if name not in reasons
    ]
    return reasons, unexpected


def format_of(options: LoadConfig, checkpoint: Checkpoint, registry: Registry) -> tuple[str, LoadFormat]:
    """Return the key and the format asked for, or the first installed one that claims the files.

    Raises:
        CapabilityError: none of them does.
    """
    formats = registry["load format"]
    files = [file.name for file in checkpoint.files]
    keys = formats.list_keys() if options.load_format == "auto" else [options.load_format]
    refusals: dict[str, str] = {}
    for key in keys:
        made: LoadFormat = formats[key]()
        verdict = made.claims(files)
        if verdict:
            return key, made
        refusals[key] = verdict.why
    raise CapabilityError(f"read {checkpoint.folder}", refusals)


def _digest(
    checkpoint: Checkpoint,
    job: Ranks,
    target: str,
    dtype: str,
    effective: Effective,
    offers: Iterable[Offer],
    nodes: Iterable[PlannedNode],
) -> str:
    """Return a hash of everything that decides what every rank loads; nothing of one rank or one machine."""
    classes = dict.fromkeys(one.cls for one in nodes)
    choices = [
        (
            type(cls.shape).__name__,
            segment.parts,
            segment.scheme.key(),
            segment.choice.backend,
            segment.choice.form.name,
        )
        for cls in classes
        for segment in cls.segments
        if segment.choice is not None
    ]
    said = {
        "files": checkpoint.identity(),
        "config": checkpoint.config_bytes_hash,
        "quantization": quantization_config(checkpoint),
        "job": [job.world, job.tp, job.ep, job.moe_tp],
        "target": target,
        "dtype": dtype,
        "options": effective.config.model_dump(mode="json", exclude=NOT_IN_DIGEST),
        "plugins": sorted({(offer.distribution, offer.version) for offer in offers}),
        "choices": choices,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
