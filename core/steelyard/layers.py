"""Layers built from a plan: this rank's share of a node, with the collectives that make it whole.

Every tensor is a Parameter or a buffer of a module, so that device moves and ``state_dict`` see it.

Legend: n and k local out- and in-features, N all out-features, H hidden size, h this rank's share of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import blueprint, ops
from steelyard.blueprint import Placement
from steelyard.collectives import Group
from steelyard.errors import ConfigError, LoadError
from steelyard.local import LocalNode

_Kind = TypeVar("_Kind", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class BuiltSegment:
    """A Segment that is ready to run.

    Attributes:
        local: Its local node: its parts and this rank's ranges.
        kernel: Its matrix product, ``kernel(x, bias)``.
        bias: Local rows of its bias (all rows if rowwise), or None.
    """

    local: LocalNode
    kernel: nn.Module
    bias: Tensor | None = None


class DenseLinear(nn.Module):
    """A plain matrix product; the torch reference kernel."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = frozen(weight)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x W^T + bias``.

        Shapes:
            x (..., k), weight (n, k), bias (n,) -> (..., n)
        """
        return functional.linear(x, self.weight, bias)


class Linear(nn.Module):
    """One rank's share of a Linear.

    Attributes:
        bias: What is added behind the sum over several ranks; where nothing is summed, the kernels add it.
        segments: Its kernels, each with the bias that it adds.
        parts: Names of the parts, in the node's order.
        part_sizes: Part to this rank's rows of it, padding included.

    Args:
        node: The node.
        segments: Its Segments, in the order of its parts.
        group: The tensor-parallel ranks.
    Raises:
        LoadError: the Segments do not make up the node: parts missing, twice or out of order, or a bias too many,
            too few or of the wrong size.
    """

    bias: nn.Parameter | None
    part_sizes: Mapping[str, int]

    def __init__(self, node: blueprint.Linear, segments: Sequence[BuiltSegment], group: Group) -> None:
        super().__init__()
        _check(node, segments)
        self.node, self.group = node, group
        self.parts = tuple(part.name for part in node.parts)
        built = {part.name: len(part.out) for one in segments for part in one.local.parts}
        built[self.parts[-1]] += segments[-1].local.padding  # only a Linear of one part is padded
        rows = [built[name] for name in self.parts]
        self.part_sizes = dict(zip(self.parts, rows, strict=True))
        self._sizes, self._inner = rows, segments[0].local.k
        # A kernel's form may want the parts in another order than the node's; outputs are put back.
        self._built = None if tuple(built) == self.parts else built
        self._is_rowwise = node.placement is Placement.ROWWISE
        self._is_colwise = node.placement is Placement.COLWISE
        uneven = (part for part, n in zip(node.parts, rows, strict=True) if n * group.size != part.out)
        self._repeated = next((part for part in uneven if not part.padded), None) if self._is_colwise else None
        biases = [one.bias for one in segments if one.bias is not None]
        behind = biases and self._is_rowwise and group.size > 1  # then it is added once, not by every rank's kernels
        self.register_parameter("bias", frozen(self._in_order(torch.cat(biases))) if behind else None)
        self.segments = nn.ModuleList(_Product(one.kernel, None if behind else one.bias) for one in segments)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns (colwise), or the whole product (rowwise, replicated).

        A rowwise product is summed over the ranks, and its bias is added once, after the sum.

        Shapes:
            x (..., k) -> (..., n)
        """
        y = self._product(x)
        if not self._is_rowwise:
            return y
        y = self.group.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """Return a rowwise product before it is summed; rank 0's has the bias, so that the sum over ranks is right.

        Raises:
            ConfigError: the Linear is not rowwise, so the sum over ranks means nothing.
        Shapes:
            x (..., k) -> (..., N)
        """
        if not self._is_rowwise:
            raise ConfigError(
                f"{self.node.stem} is {self.node.placement.value}; only a rowwise Linear is summed over ranks"
            )
        y = self._product(x)
        return y if self.bias is None or self.group.rank else y + self.bias

    def gathered(self, x: Tensor) -> Tensor:
        """Return the whole product on every rank: parts whole and in order, without the padding of a vocabulary.

        Raises:
            ConfigError: key/value heads are repeated over the ranks, so joining them would double some.
        Shapes:
            x (..., k) -> (..., N)
        """
        size = self.group.size
        if not self._is_colwise or size == 1:
            return self.forward(x)
        if self._repeated is not None:
            raise ConfigError(
                f"{self.node.stem}: {self._repeated.heads} heads of {self._repeated.name!r} are repeated over {size} "
                "ranks, so their outputs cannot be gathered; split() this rank's output instead"
            )
        y = self.group.all_gather(self._product(x))
        if len(self._sizes) > 1:  # ranks stand in front of parts, and change places
            parts = self.split(y.reshape(*y.shape[:-1], size, -1))
            y = torch.cat([part.flatten(-2) for part in parts], -1)
        return y[..., : sum(part.out for part in self.node.parts)]

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of an output of `forward`, in the node's order.

        Shapes:
            y (..., n) -> one (..., n of the part) a part
        """
        return torch.split(y, self._sizes, -1)

    def extra_repr(self) -> str:
        """Describe the node and this rank's share."""
        names = f", parts {'|'.join(self.parts)}" if len(self.parts) > 1 else ""
        out = sum(part.out for part in self.node.parts)
        return (
            f"in {self.node.in_features} (here {self._inner}), out {out} (here {sum(self._sizes)}){names}, "
            f"{_place(self.node.placement, self.group)}"
        )

    def _product(self, x: Tensor) -> Tensor:
        if len(self.segments) == 1:
            y: Tensor = self.segments[0](x)
            return self._in_order(y)
        return self._in_order(torch.cat([segment(x) for segment in self.segments], -1))

    def _in_order(self, y: Tensor) -> Tensor:
        """Return columns that stand in the order of the kernels' parts in the order of the node's."""
        if self._built is None:
            return y
        parts = dict(zip(self._built, torch.split(y, list(self._built.values()), -1), strict=True))
        return torch.cat([parts[name] for name in self.parts], -1)


class Embedding(nn.Module):
    """One rank's share of a look-up table.

    Args:
        node: The node.
        local: This rank's rows (colwise) or columns (rowwise).
        weight: Them; padding of a vocabulary at the end.
        group: The tensor-parallel ranks.
    Raises:
        LoadError: the weight has another shape than this rank's share.
    Shapes:
        weight (n, h)
    """

    def __init__(self, node: blueprint.Embedding, local: LocalNode, weight: Tensor, group: Group) -> None:
        super().__init__()
        if tuple(weight.shape) != (local.n, local.k):
            raise LoadError(
                f"{node.stem}: a weight of shape {list(weight.shape)}, this rank holds [{local.n}, {local.k}]"
            )
        self.node, self.group = node, group
        self.weight = frozen(weight)
        self._rows = local.parts[0].out

    def forward(self, ids: Tensor) -> Tensor:
        """Return whole rows of the table.

        Raises:
            IndexError: an id is outside the vocabulary; see `local`.
        Shapes:
            ids (...) -> (..., H)
        """
        return self.whole(self.local(ids))

    def local(self, ids: Tensor) -> Tensor:
        """Return this rank's share of each row: its columns, or the row if it is its own and else zeros.

        Ids are checked on the CPU. Elsewhere a check would wait for the device: a table that is not cut by rows
        fails there by the device's own assertion, and one that is gives zeros for an id that nobody has.

        Raises:
            IndexError: an id is outside the vocabulary (on the CPU).
        Shapes:
            ids (...) -> (..., h)
        """
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(end) for end in torch.aminmax(ids))
            if low < 0 or high >= self.node.vocabulary:
                wrong = low if low < 0 else high
                raise IndexError(f"{self.node.stem}: id {wrong} is outside a vocabulary of {self.node.vocabulary}")
        if self._rows.whole:
            return functional.embedding(ids, self.weight)
        others = (ids < self._rows.start) | (ids >= self._rows.stop)
        found = functional.embedding((ids - self._rows.start).masked_fill(others, 0), self.weight)
        return found.masked_fill(others[..., None], 0)  # not times 0: a row that nobody asked for may hold NaN

    def whole(self, share: Tensor) -> Tensor:
        """Make whole rows of the ranks' shares; shares of several tables may be added before. ``share`` is given up.

        Shapes:
            (..., h) -> (..., H)
        """
        match self.node.placement:
            case Placement.COLWISE:
                return self.group.all_reduce(share)
            case Placement.ROWWISE:
                return self.group.all_gather(share)
            case Placement.REPLICATED:
                return share

    def extra_repr(self) -> str:
        """Describe the node and this rank's share."""
        rows, columns = self.weight.shape
        return (
            f"vocabulary {self.node.vocabulary} (here {rows}), hidden {self.node.hidden} (here {columns}), "
            f"{_place(self.node.placement, self.group)}"
        )


class Norm(nn.Module):
    """A normalisation, whole on every rank.

    Args:
        node: The node.
        weight: What the normalised input is multiplied by.
        bias: What is added then, or None.
    Raises:
        LoadError: the weight or the bias is not of the node's size. A piece of a norm that is cut over ranks is
            refused too: what is normalised together would have to be summed over them.
    Shapes:
        weight (H,), bias (H,)
    """

    bias: nn.Parameter | None

    def __init__(self, node: blueprint.Norm, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if tuple(weight.shape) != (node.size,):
            raise LoadError(f"{node.stem}: a weight of shape {list(weight.shape)} for a norm over {node.size} elements")
        _check_bias(node, bias, node.size)
        self.node = node
        self.weight = frozen(weight)
        self.register_parameter("bias", None if bias is None else frozen(bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, computed in float32, in the input's dtype.

        Shapes:
            (..., H) -> (..., H)
        """
        if self.node.kind == "layer":
            return ops.layer_norm(x, self.weight, self.bias, self.node.eps)
        y = ops.rms_norm(x, self.weight, self.node.eps)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Describe the node."""
        return f"{self.node.kind} over {self.node.size}, eps {self.node.eps}"


class Weight(nn.Module):
    """Any other tensor of a model.

    Attributes:
        value: The tensor.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = frozen(value)


class State(nn.Module):
    """What attention keeps beside its projections: a buffer a name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def take(built: Mapping[str, nn.Module], stem: str, kind: type[_Kind]) -> _Kind:
    """Return a built node, for a family's module.

    Raises:
        LoadError: it was built as something else.
    """
    node = built[stem]
    if not isinstance(node, kind):
        raise LoadError(f"{stem} was built as {type(node).__name__}, and the family's module takes a {kind.__name__}")
    return node


def frozen(t: Tensor) -> nn.Parameter:
    """Return a tensor as a Parameter that is not trained."""
    return nn.Parameter(t, requires_grad=False)


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the one plain weight of a layer.

    Raises:
        LoadError: it has several, or one that is packed for a kernel.
    """
    return _holder(module).weight


def share_weight(target: nn.Module, source: nn.Module) -> None:
    """Make a layer hold the very Parameter that another holds, so that they stay one whatever happens to it.

    Args:
        target: An Embedding, a Norm, or a Linear of one Segment with a plain weight; its own weight is given up.
        source: Another of these.
    Raises:
        LoadError: one of them has no plain weight, or the shapes or dtypes differ.
    """
    holder, shared = _holder(target), weight_of(source)
    if holder.weight.shape != shared.shape or holder.weight.dtype != shared.dtype:
        mine, theirs = (
            f"{list(one.shape)} in {str(one.dtype).removeprefix('torch.')}" for one in (holder.weight, shared)
        )
        raise LoadError(f"a weight of shape {mine} and one of shape {theirs} cannot be one")
    holder.weight = shared


class _Product(nn.Module):
    """One Segment's kernel, and the bias that it adds."""

    bias: nn.Parameter | None

    def __init__(self, kernel: nn.Module, bias: Tensor | None) -> None:
        super().__init__()
        self.kernel = kernel
        self.register_parameter("bias", None if bias is None else frozen(bias))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kernel(x, self.bias)
        return y


def _check(node: blueprint.Linear, segments: Sequence[BuiltSegment]) -> None:
    built = [sorted(part.name for part in one.local.parts) for one in segments]
    wanted, names = [part.name for part in node.parts], [part.name for one in segments for part in one.local.parts]
    starts = [sum(map(len, built[:index])) for index in range(len(built))]
    # A Segment holds parts that follow one another; inside it a kernel's form decides their order.
    if built != [sorted(wanted[start : start + len(mine)]) for start, mine in zip(starts, built, strict=True)] or len(
        names
    ) != len(wanted):
        raise LoadError(f"{node.stem}: its Segments have the parts {names}, the node has {wanted}")
    for one in segments:
        _check_bias(node, one.bias, one.local.n)


def _check_bias(node: blueprint.Linear | blueprint.Norm, bias: Tensor | None, size: int) -> None:
    if bias is None:
        if node.bias:
            raise LoadError(f"{node.stem}: the node has a bias, and none was loaded")
    elif not node.bias:
        raise LoadError(f"{node.stem}: the node has no bias, and one was loaded")
    elif tuple(bias.shape) != (size,):
        raise LoadError(f"{node.stem}: a bias of shape {list(bias.shape)}, this rank holds [{size}]")


def _holder(module: nn.Module) -> Embedding | DenseLinear | Norm:
    kernels = [module]
    if isinstance(module, Linear):
        kernels = [one.kernel for one in module.segments if isinstance(one, _Product)]
    if len(kernels) == 1 and isinstance(kernels[0], (Embedding, DenseLinear, Norm)):
        return kernels[0]
    made_of = f" of {', '.join(type(kernel).__name__ for kernel in kernels)}" if isinstance(module, Linear) else ""
    raise LoadError(f"a {type(module).__name__}{made_of} has no one plain weight that could be shared")


def _place(placement: Placement, group: Group) -> str:
    return f"{placement.value}, rank {group.rank} of {group.size}"
