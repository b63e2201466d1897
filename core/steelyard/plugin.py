"""The door for plugins that needs no torch: everything that a plugin may import from steelyard while planning.

The other door is `steelyard.torch`. Everything else may change without notice.
"""

from __future__ import annotations

from steelyard import decoder, fields
from steelyard.blueprint import (
    Absent,
    AttentionState,
    Blueprint,
    Embedding,
    Experts,
    FillWith,
    Linear,
    Node,
    Norm,
    Param,
    Part,
    Placement,
    Tie,
)
from steelyard.checkpoint import Checkpoint
from steelyard.dtypes import DTYPES, FLOATS, nbytes
from steelyard.errors import (
    BadConfig,
    BrokenPlugin,
    CapabilityError,
    CheckpointError,
    ConfigError,
    CutError,
    LoadError,
    PlanError,
    SteelyardError,
    UnknownPlugin,
)
from steelyard.findings import Finding
from steelyard.flags import parse_flag
from steelyard.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, scale_shape
from steelyard.hookspecs import hookimpl
from steelyard.layouts import Companion, Cutter, Drop, Layout, Source, StoredTensor, plain
from steelyard.local import LocalExperts, LocalNode, LocalPart
from steelyard.placement import Axis, Cut, Fixed, Order, RowOrder, Slice, Span, cut
from steelyard.protocols import (
    Config,
    ExpertsBackend,
    ExpertsKernel,
    KernelBackend,
    LinearKernel,
    LoadFormat,
    ModelFamily,
    QuantConfig,
    QuantDialect,
    QuantMethod,
    Reader,
    TuningProvider,
    WeightMapping,
)
from steelyard.ranks import Ranks, distribute, head_range
from steelyard.schemes import UNQUANTIZED, Accept, Activation, Footprint, Form, LayerScheme, Verdict

__all__ = [
    "DTYPES",
    "FLOATS",
    "UNQUANTIZED",
    "Absent",
    "Accept",
    "Activation",
    "AttentionState",
    "Axis",
    "BadConfig",
    "Blueprint",
    "BrokenPlugin",
    "CapabilityError",
    "Checkpoint",
    "CheckpointError",
    "Companion",
    "Config",
    "ConfigError",
    "Cut",
    "CutError",
    "Cutter",
    "Drop",
    "Embedding",
    "Experts",
    "ExpertsBackend",
    "ExpertsKernel",
    "FillWith",
    "Finding",
    "Fixed",
    "Footprint",
    "Form",
    "Granularity",
    "KernelBackend",
    "LayerScheme",
    "Layout",
    "Linear",
    "LinearKernel",
    "LoadError",
    "LoadFormat",
    "LocalExperts",
    "LocalNode",
    "LocalPart",
    "ModelFamily",
    "Node",
    "Norm",
    "Order",
    "Param",
    "Part",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Placement",
    "PlanError",
    "QuantConfig",
    "QuantDialect",
    "QuantMethod",
    "Ranks",
    "Reader",
    "RowOrder",
    "Slice",
    "Source",
    "Span",
    "SteelyardError",
    "StoredTensor",
    "Tie",
    "TuningProvider",
    "UnknownPlugin",
    "Verdict",
    "WeightMapping",
    "cut",
    "decoder",
    "distribute",
    "fields",
    "head_range",
    "hookimpl",
    "nbytes",
    "parse_flag",
    "plain",
    "scale_shape",
]
