"""The contracts of a plugin: one Protocol a kind.

Everything above a Protocol's mark "torch" is pure and torch-free, and is asked while planning; what is below it is
called only when tensors exist. Classes are made without arguments, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from steelyard.blueprint import Blueprint, Node
from steelyard.findings import Finding
from steelyard.layouts import Companion, Drop, Layout, Source
from steelyard.local import LocalExperts, LocalNode
from steelyard.schemes import Accept, Footprint, Form, LayerScheme, Verdict
from steelyard.steps import Read

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

    from steelyard.checkpoint import Checkpoint
    from steelyard.headers import TensorEntry

Config = Mapping[str, Any]
"""A parsed ``config.json``."""


class ModelFamily(Protocol):
    """A group of architectures that share one model.

    Proved by:
        steelyard.testing.ModelFamilySuite
    """

    keys: ClassVar[tuple[str, ...]]
    """Architecture names and ``model_type`` values."""

    def blueprint(self, config: Config) -> Blueprint:
        """Return the model's nodes; raise ConfigError naming the key and value that cannot be met."""
        ...

    def mapping(self, config: Config) -> WeightMapping:
        """Return where the nodes' names stand in a published checkpoint, as far as the config decides it."""
        ...

    def defaults(self, config: Config) -> Mapping[str, Any]:
        """Return load options that the family sets unless the user does, as nested plain data."""
        ...

    def lora_targets(self) -> Mapping[str, str]:
        """Return adapter module names and the node parts they stand for; empty if adapters are not supported."""
        ...

    def module(self, config: Config, built: Mapping[str, nn.Module]) -> nn.Module:
        """Build the runnable model (torch).

        Args:
            config: The checkpoint's config.
            built: Stem to built node; each is taken exactly once.
        """
        ...


class WeightMapping(Protocol):
    """Where a node's tensors stand in one publisher's checkpoints.

    Names are expanded forwards: from the node to every name that it may have, never by rewriting a name found.

    Proved by:
        steelyard.testing.WeightMappingSuite
    """

    def names(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        """Return the alternatives for one part of a node; for experts, for one expert.

        Sources of a stacked tensor are equal for every expert.
        """
        ...

    def drops(self, config: Config) -> tuple[Drop, ...]:
        """Return what is left out on purpose, each with its reason."""
        ...


class QuantConfig(Protocol):
    """A parsed quantization config: answers for one part at a time, on names as they stand in the checkpoint."""

    def scheme(self, names: Sequence[str], cls: str, headers: Mapping[str, TensorEntry]) -> LayerScheme | None:
        """Return how a part is quantized; None if it is not.

        Args:
            names: Every path that the part may have in the checkpoint.
            cls: The node's class name, such as ``"Linear"``.
            headers: The checkpoint's tensors, for evidence.
        """
        ...

    def companions(self) -> tuple[Companion, ...]:
        """Return the tensors stored beside nodes, applied before any part rule."""
        ...

    def findings(self) -> Sequence[Finding]:
        """Return what the config itself has to say once every part was asked: unused patterns, unread keys."""
        ...


class QuantDialect(Protocol):
    """A publisher's way to write a quantization config; its keys are values of ``quant_method``.

    Proved by:
        tests/unit/test_planning_quantized.py
    """

    keys: ClassVar[tuple[str, ...]]

    def parse(self, config: Config, files: Mapping[str, Any]) -> QuantConfig:
        """Read a quantization config, every key checked.

        Args:
            config: The quantization config found.
            files: Name to content of the checkpoint's other JSON files, read when looked up.
        Raises:
            ConfigError: a key or a value is not understood.
        """
        ...


class QuantMethod(Protocol):
    """How one scheme's tensors are stored, and how they become what a kernel takes.

    Proved by:
        tests/unit/geometry
    """

    keys: ClassVar[tuple[str, ...]]
    """Scheme keys, ``<weight>.<packing>[.a<act>][.experts]``."""

    def layouts(self, scheme: LayerScheme, node: Node) -> tuple[Layout, ...]:
        """Return the closed alternatives of stored tensors; without the bias, which core adds."""
        ...

    def prepared(self, scheme: LayerScheme, node: LocalNode, form: Form) -> Footprint:
        """Return the bytes of the prepared weights (one expert's, for experts) and of the work beside them."""
        ...

    def prepare(
        self, stored: Mapping[str, Tensor], scheme: LayerScheme, node: LocalNode, form: Form
    ) -> Mapping[str, Tensor]:
        """Turn one Segment's stored tensors into the form that the kernel takes (torch).

        Args:
            stored: Tensor name to this rank's piece, on the target device; owned by the caller.
            scheme: The scheme, its grid refined if the plan says so.
            node: The local node with the Segment's parts.
            form: The chosen backend's form.
        """
        ...

    def dequantize(self, stored: Mapping[str, Tensor], scheme: LayerScheme, node: LocalNode, to: dtype) -> Tensor:
        """Return the real weight (torch).

        Shapes:
            stored, as the layout says -> (n, k) of the local node
        """
        ...


class LinearKernel(Protocol):
    """A matrix product with weights packed inside; an ``nn.Module``, so that its tensors move with the model."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x W^T + bias``.

        Shapes:
            x (..., k) -> (..., n)
        """
        ...


class KernelBackend(Protocol):
    """A library of kernels for some hardware.

    Proved by:
        tests/unit/test_choice.py
    """

    keys: ClassVar[tuple[str, ...]]

    def serves(self, target: str) -> Verdict:
        """Say whether the backend has kernels for a target (``"sm_90"``, ``"gfx942"``, ``"cpu"``)."""
        ...

    def installed(self) -> Verdict:
        """Say whether it can run here; the reason names what is missing."""
        ...

    def accepts(self, scheme: LayerScheme, node: LocalNode, target: str) -> Accept:
        """Say whether it takes a layer, and in which form."""
        ...

    def linear(self, weights: Mapping[str, Tensor], scheme: LayerScheme, node: LocalNode) -> LinearKernel:
        """Build the kernel from prepared weights, which it owns and frees (torch)."""
        ...


class ExpertsKernel(Protocol):
    """Routed experts with weights packed inside; an ``nn.Module``, so that its tensors move with the model."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what this rank's experts make of each token; zeros for a token of none of them.

        Args:
            x: Tokens; not changed.
            ids: The experts of each token, numbered over all ranks.
            weights: What each expert's output is multiplied by.
        Shapes:
            x (T, H), ids and weights (T, top_k), weights in float32 -> (T, H), in x's dtype; T may be 0
        """
        ...


@runtime_checkable
class ExpertsBackend(Protocol):
    """What a `KernelBackend` offers besides, if it has kernels for routed experts.

    Proved by:
        tests/unit/test_experts_choice.py
    """

    def accepts_experts(self, w13: LayerScheme, w2: LayerScheme, node: LocalExperts, target: str) -> Accept:
        """Say whether it takes the experts of a layer, and in which form; one form for both matrices.

        Args:
            w13: How gate and up are quantized.
            w2: How down is quantized.
            node: The rank's piece.
            target: What it shall run on.
        """
        ...

    def experts(
        self, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], schemes: tuple[LayerScheme, LayerScheme],
        node: LocalExperts,
    ) -> ExpertsKernel:  # fmt: skip
        """Build the kernel from prepared weights, which it owns and frees (torch).

        Args:
            w13: Gate and up of every expert, in the form's part order; ``bias`` if the node has one.
            w2: Down; ``bias`` is zero on all but the first of the ranks that share an expert.
            schemes: How the two are quantized, on the refined grid if the plan says so.
            node: The rank's piece.
        """
        ...


class LoadFormat(Protocol):
    """A way to get a plan's bytes.

    Proved by:
        tests/unit/test_reader.py
    """

    keys: ClassVar[tuple[str, ...]]

    def claims(self, files: Sequence[str]) -> Verdict:
        """Say whether the format reads these files."""
        ...

    def open(self, checkpoint: Checkpoint, way: str) -> Reader:
        """Open a reader, ``"mmap"`` or ``"pread"`` (torch)."""
        ...


class Reader(Protocol):
    """Hands out pieces of stored tensors; a context manager that closes every handle.

    Attributes:
        bytes_read: Bytes asked of files so far.
    """

    bytes_read: int

    def read(self, read: Read) -> Tensor:
        """Return the piece that a read's cut takes, as stored.

        Shapes:
            read.shape -> read.cut.taken
        """
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class TuningProvider(Protocol):
    """A source of tuned kernel configurations.

    Proved by:
        the plugin that first offers one
    """

    keys: ClassVar[tuple[str, ...]]
