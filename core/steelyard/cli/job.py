"""Commands under ``torchrun``: the process group that they run in, and which rank prints."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def require_torch() -> None:
    """Raise CapabilityError, which says what to install, before anything that needs torch is imported."""
    from steelyard.errors import CapabilityError
    from steelyard.target import has_torch

    if not has_torch():
        raise CapabilityError("load a model", {"torch": "is not installed; pip install 'steelyard[torch]'"})


@contextmanager
def job() -> Iterator[bool]:
    """Join the job that ``torchrun`` started, if it did, for as long as the command runs.

    Yields:
        Whether this process prints: the only one, or rank 0.
    """
    import torch
    from torch import distributed

    gc.enable()  # a model runs from here on; see `steelyard.cli.main`
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl")
    else:
        distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank() == 0
    finally:
        distributed.destroy_process_group()
