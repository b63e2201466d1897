"""Activations by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.errors import ConfigError

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}
"""Activation by the name that configs use.

Source:
    transformers 5.24, ``activations.py``: ``gelu`` is the exact form (erf), ``gelu_new`` and ``gelu_pytorch_tanh`` the
    tanh form.
"""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by the name that configs use.

    Raises:
        ConfigError: the name is not known.

    >>> activation("relu")(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    known = ACTIVATIONS.get(name)
    if known is None:
        raise ConfigError(f"activation {name!r} is not known; there are {', '.join(ACTIVATIONS)}")
    return known
