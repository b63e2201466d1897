"""Names to tensors: finds the stored tensors of each part of each node, and the one layout that fits them.

Equal shapes are matched once: what is worked out for a part is kept under the node's shape, the scheme and the
headers found, and shared by every layer and expert that has the same. Everything that does not fit is a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steelyard.blueprint import AttentionState, Embedding, FillWith, Linear, Node, Norm, Param
from steelyard.findings import Finding, FindingCode
from steelyard.headers import TensorEntry
from steelyard.layouts import Layout, Source, StoredTensor
from steelyard.placement import Axis, Dims, Fixed, Order, Pairs, RowOrder, describe_dims, stored_shape
from steelyard.schemes import LayerScheme
from steelyard.units import Found, Unit, UnitClass, sizes_of


class Matcher:
    """Finds parts in one checkpoint's headers and keeps who claimed which tensor."""

    def __init__(self, entries: Mapping[str, TensorEntry], files: Sequence[str], asked: str) -> None:
        self.entries, self._files, self._asked = entries, files, asked
        self.findings: list[Finding] = []
        self.claims: dict[str, tuple[str, str]] = {}  # stored name -> (stem, part) that uses it
        self.blamed: set[str] = set()  # found, and already the subject of an error
        self._classes: dict[tuple[object, ...], tuple[UnitClass | None, tuple[int, ...]]] = {}
        self._probes: dict[int, tuple[StoredTensor, ...]] = {}
        self._seen: set[str] = set()
        self._shared: dict[str, tuple[Order, dict[str, str]]] = {}

    def file_of(self, name: str) -> str:
        """Return the file in which a tensor lies."""
        return self._files[self.entries[name].file]

    def absent(self, layouts: Sequence[Layout], sources: Sequence[Source]) -> bool:
        """Return whether none of the layouts' tensors is stored under any of the sources."""
        return not any(
            name in self.entries
            for layout in layouts
            for tensor in layout.tensors
            for source in sources
            for name in source.names(tensor)
        )

    def match(
        self,
        node: Linear | Embedding | Norm | Param | AttentionState,
        shape: Node,
        part: str,
        scheme: LayerScheme,
        layouts: tuple[Layout, ...],
        sources: tuple[Source, ...],
        *,
        stem: str,
        experts: int | None = None,
    ) -> Unit | None:
        """Find one part's tensors and the layout that fits them; None, with findings, if there is none.

        Args:
            node: The node, or the Linear of one expert.
            shape: `shape_of` the node; the same object for equal shapes.
            part: The part's name.
            scheme: How it is quantized.
            layouts: The method's alternatives, bias and companions included; the same object for equal shapes.
            sources: Where the mapping says it may stand.
            stem: The node's name, with the expert's number if there is one.
            experts: Experts of the node, if it has any.
        """
        probes = self._probes.get(id(layouts))
        if probes is None:
            probes = self._probes[id(layouts)] = tuple(
                dict.fromkeys(tensor for layout in layouts for tensor in layout.tensors)
            )
        hits: list[tuple[str, TensorEntry, Source] | None] = []
        signature: list[object] = [id(layouts), id(shape), part, experts]
        for probe in probes:
            hit = self._look(probe, sources, stem)
            hits.append(hit)
            signature.append(None if hit is None else (hit[1].dtype, hit[1].shape, hit[2].shape_key))
        key = tuple(signature)
        known = self._classes.get(key)
        if known is None:
            known = self._fit(node, part, scheme, layouts, sources, probes, hits, stem, experts)
            if known[0] is not None:
                self._classes[key] = known
        cls, used = known
        if cls is None:
            return None
        entries = tuple(_entry(hits, index) for index in used)
        self._claim(cls, entries, stem, part)
        return Unit(cls, entries)

    def _look(
        self, tensor: StoredTensor, sources: Sequence[Source], stem: str
    ) -> tuple[str, TensorEntry, Source] | None:
        entries = self.entries
        hit: tuple[str, TensorEntry, Source] | None = None
        for source in sources:
            path, respell = source.path, source.respell
            for spelling in tensor.spellings:
                name = path + (respell.get(spelling, spelling) if respell else spelling)
                entry = entries.get(name)
                if entry is None:
                    continue
                if hit is not None and hit[0] == name:
                    if source.shape_key != hit[2].shape_key:
                        self._error(
                            "layout", name, f"{name}: the mappings lay it out in two ways for {stem}'s {tensor.name}"
                        )
                        self.blamed.add(name)
                    continue
                if hit is not None:
                    files = " and ".join(dict.fromkeys(map(self.file_of, (hit[0], name))))
                    text = f"both are {stem}'s {tensor.name}; keep one of them ({files})"
                    self._error("duplicate", name, f"duplicate tensors {hit[0]} and {name}: {text}")
                    self.blamed.add(name)
                    continue
                hit = (name, entry, source)
        return hit

    def _fit(
        self,
        node: Linear | Embedding | Norm | Param | AttentionState,
        part: str,
        scheme: LayerScheme,
        layouts: Sequence[Layout],
        sources: Sequence[Source],
        probes: Sequence[StoredTensor],
        hits: Sequence[tuple[str, TensorEntry, Source] | None],
        stem: str,
        experts: int | None,
    ) -> tuple[UnitClass | None, tuple[int, ...]]:
        fits: list[tuple[UnitClass, tuple[int, ...]]] = []
        refusals: list[tuple[int, Layout, list[Finding]]] = []
        for layout in layouts:
            found: list[Found] = []
            used: list[int] = []
            problems: list[Finding] = []
            for tensor in layout.tensors:
                index = probes.index(tensor)
                hit = hits[index]
                if hit is None:
                    if tensor.absent == "error":
                        problems.append(self._missing(tensor, node, sources, stem))
                    elif isinstance(tensor.absent, FillWith):
                        dims = tensor.dims[0]
                        found.append(Found(tensor, dims, dims, tensor.dtypes[0], (), fill=tensor.absent))
                        used.append(-1)
                    continue
                one = self._accept(tensor, node, part, experts, hit, stem)
                if isinstance(one, Finding):
                    problems.append(one)
                else:
                    found.append(one)
                    used.append(index)
            if problems:
                refusals.append((len(used), layout, problems))
            else:
                stacked = any(one.stacked for one in found)
                fits.append((UnitClass(part, scheme, layout, tuple(found), stacked), tuple(used)))
        if not fits:
            self._refuse(stem, scheme, layouts, refusals, hits)
            return None, ()
        best = max(sum(index >= 0 for index in used) for _, used in fits)
        winners = [fit for fit in fits if sum(index >= 0 for index in fit[1]) == best]
        if len(winners) > 1:
            names = " and ".join(cls.layout.name for cls, _ in winners)
            self._error("layout", stem, f"{stem}: layouts {names} of scheme {scheme.key()} both fit the headers")
            self.blamed.update(hit[0] for hit in hits if hit is not None)
            return None, ()
        return winners[0]

    def _accept(
        self,
        tensor: StoredTensor,
        node: Linear | Embedding | Norm | Param | AttentionState,
        part: str,
        experts: int | None,
        hit: tuple[str, TensorEntry, Source],
        stem: str,
    ) -> Found | Finding:
        name, entry, source = hit
        if source.stacked:
            stem = stem.rpartition(".")[0]  # the tensor is every expert's, and so is what is wrong with it
        where = f"{name} ({self._files[entry.file]})"
        if entry.dtype not in tensor.dtypes:
            return Finding(
                "dtype", "error", name,
                f"{where}: stored as {entry.dtype}, {stem} takes {' or '.join(tensor.dtypes)}; "
                "codes and floats are never cast into each other",
            )  # fmt: skip
        sizes = sizes_of(node, part, experts if source.stacked else None)
        if source.order is not None:
            lies = [name for name, _ in source.order.runs]
            if part not in lies:
                return Finding(
                    "layout", "error", name,
                    f"{where}: the mapping says that {part!r} of {stem} lies in it, but lays only {', '.join(lies)}",
                )  # fmt: skip
            if source.order.rows(part) != sizes["out"]:
                return Finding(
                    "shape", "error", name,
                    f"{where}: the mapping lays {source.order.rows(part)} rows of {part!r} in it, {stem} has {sizes['out']}",
                )  # fmt: skip
            sizes["out"] = source.order.total
        tried: list[str] = []
        for form in tensor.dims:
            try:
                dims = source.dims(form)
                expected = stored_shape(dims, sizes)
            except ValueError as error:
                tried.append(f"{describe_dims(form)} ({error})")
                continue
            except KeyError as error:
                tried.append(f"{describe_dims(form)} (it has no axis {error})")
                continue
            if expected == entry.shape:
                target = (dims[0], *form) if source.stacked else form
                canonical = tensor.dims[0]
                if _squeeze(canonical) == _squeeze(form):
                    target = (dims[0], *canonical) if source.stacked else canonical
                pairs = _pairs(node, part, form, source)
                if isinstance(pairs, str):
                    return Finding("layout", "error", name, f"{where}: {pairs}")
                swap = _swap(form, source)
                return Found(tensor, dims, target, entry.dtype, entry.shape, source.order, source.stacked, swap, pairs)
            tried.append(f"{list(expected)} = {describe_dims(dims)}")
        return Finding(
            "shape", "error", name,
            f"{where}: stored shape {list(entry.shape)}, {stem} expects {' or '.join(tried)} "
            f"with out={sizes['out']}{_said_by(node)}, in={sizes.get('in', 1)} ({self._asked})",
        )  # fmt: skip

    def _missing(
        self,
        tensor: StoredTensor,
        node: Linear | Embedding | Norm | Param | AttentionState,
        sources: Sequence[Source],
        stem: str,
    ) -> Finding:
        names = list(dict.fromkeys(name for source in sources for name in source.names(tensor)))
        if not names:
            return Finding(
                "missing", "error", stem, f"missing {tensor.name} of {stem}: the mapping names no place for it"
            )
        also = f" (also looked for {', '.join(names[1:])})" if len(names) > 1 else ""
        asked = f" ({node.because})" if isinstance(node, Linear) and node.because else ""
        return Finding("missing", "error", names[0], f"missing tensor {names[0]}{also}, needed for {stem}{asked}")

    def _refuse(
        self,
        stem: str,
        scheme: LayerScheme,
        layouts: Sequence[Layout],
        refusals: list[tuple[int, Layout, list[Finding]]],
        hits: Sequence[tuple[str, TensorEntry, Source] | None],
    ) -> None:
        if not refusals:
            self._error("layout", stem, f"{stem}: the method of scheme {scheme.key()} has no layout for it")
            return
        _, nearest, problems = max(refusals, key=lambda refusal: (refusal[0], -len(refusal[2])))
        self.blamed.update(hit[0] for hit in hits if hit is not None)
        if len(layouts) == 1:
            self.findings.extend(problems)
            return
        others = ", ".join(layout.name for layout in layouts if layout is not nearest)
        for problem in problems:
            text = f"{problem.text}; the nearest layout of scheme {scheme.key()} is {nearest.name}, not {others}"
            self.findings.append(replace(problem, text=text))

    def _claim(self, cls: UnitClass, entries: Sequence[TensorEntry | None], stem: str, part: str) -> None:
        for found, entry in zip(cls.tensors, entries, strict=True):
            if entry is None:
                continue
            name = entry.name
            before = self.claims.setdefault(name, (stem, part))
            if found.order is not None:
                order, parts = self._shared.setdefault(name, (found.order, {}))
                if order == found.order and parts.setdefault(part, stem) == stem == before[0]:
                    continue
            elif before == (stem, part) and name not in self._seen:
                self._seen.add(name)
                continue
            other = f"{before[0]} {before[1]}".strip()
            self._error("collision", name, f"{name} would fill both {other} and {f'{stem} {part}'.strip()}")

    def report_unread_parts(self) -> None:
        """Add a finding for every tensor shared by several parts of which some are nobody's."""
        for name, (order, parts) in self._shared.items():
            left = [part for part, _ in order.runs if part not in parts]
            if left and name not in self.blamed:
                self._error("unexpected", name, f"{name}: no node reads its parts {', '.join(left)}")

    def _error(self, code: FindingCode, subject: str, text: str) -> None:
        self.findings.append(Finding(code, "error", subject, text))


def _entry(hits: Sequence[tuple[str, TensorEntry, Source] | None], index: int) -> TensorEntry | None:
    hit = hits[index] if index >= 0 else None
    return hit[1] if hit is not None else None


def _said_by(node: Linear | Embedding | Norm | Param | AttentionState) -> str:
    """Return which key of the config set a node's rows, where the family says it."""
    return f" (the config's {node.rows_key})" if isinstance(node, Embedding) and node.rows_key else ""


def _squeeze(dims: Dims) -> Dims:
    return tuple(dim for dim in dims if dim != Fixed(1))


def _swap(form: Dims, source: Source) -> tuple[int, int] | None:
    if not source.transposed:
        return None
    stored = source.dims(form)
    plain = (stored[0], *form) if source.stacked else form
    moved = [index for index, (a, b) in enumerate(zip(stored, plain, strict=True)) if a != b]
    if not moved:
        return None
    return moved[0], moved[1]


def _pairs(
    node: Linear | Embedding | Norm | Param | AttentionState, part: str, form: Dims, source: Source
) -> Pairs | str | None:
    """Return which rows must leave their rotary pairs, None if no rows are in pairs, or why that cannot be done."""
    along_out = [index for index, dim in enumerate(form) if isinstance(dim, Axis) and dim.of == "out"]
    if source.rows is RowOrder.PLAIN or not along_out:
        return None
    heads = next((one.heads for one in node.parts if one.name == part), None) if isinstance(node, Linear) else None
    out = sizes_of(node, part, None)["out"]
    if not heads or out % heads or (out // heads) % 2:
        return f"the mapping says that its rows lie in rotary pairs, but {part!r} has no heads of an even size"
    if source.stacked or form[along_out[0]] != Axis("out"):
        return f"its rows lie in rotary pairs, which cannot be put in order in {describe_dims(form)}"
    return Pairs(along_out[0], out // heads)
