"""How ranks find the store of their agreement: through the job's own store, which all have reached already."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

# Documented in torch.distributed, whose __init__ re-exports them without saying so.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from steelyard.errors import ConfigError

STORE_ERRORS = (RuntimeError, OSError)  # DistStoreError and DistNetworkError are RuntimeErrors; others come too


def job_store(timeout: float) -> Store:
    """Return the store through which the job's process group was made, which every rank has reached.

    Args:
        timeout: Seconds that reaching it again may take, where that is needed.
    Raises:
        ConfigError: a torch before 2.9, and a process group that was made without torchrun's environment.
    """
    world = distributed.group.WORLD
    assert world is not None, "the caller has checked that torch.distributed is initialised"
    if hasattr(world, "get_group_store"):  # torch 2.9 or newer
        return world.get_group_store()
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise ConfigError(
            f"{missing} is not set, and this torch ({torch.__version__}, before 2.9) does not tell the store of its "
            f"process group otherwise: start the ranks with torchrun, or install torch 2.9 or newer"
        ) from None
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def machine() -> str:
    """Return what two processes share iff each reaches the other through the loopback device."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def addresses(job: Store) -> list[str]:
    """Return names under which other machines may reach this one, the likeliest first.

    The job's own store lies with rank 0 under torchrun, at an address that every rank has used already.
    """
    while isinstance(job, PrefixStore):
        job = job.underlying_store
    found = [job.host] if isinstance(job, TCPStore) else []
    name = socket.gethostname()
    found += [name, socket.getfqdn()]
    try:
        found += sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except socket.gaierror:
        pass  # a machine whose own name does not resolve is reached by the job's address
    return list(dict.fromkeys(found))


def connect(record: Mapping[str, object], patience: float, timeout: float) -> TCPStore | None:
    """Return a connection to the store that a record tells of, or None if no address leads to it now.

    Args:
        record: What rank 0 published.
        patience: Seconds for each step of each address; TCPStore itself may take a few times as long.
        timeout: Seconds that the store's own calls may take later.
    """
    hosts, port = record["hosts"], record["port"]
    assert isinstance(hosts, list)
    assert isinstance(port, int)
    for host in ["localhost", *hosts] if record["machine"] == machine() else hosts:
        try:
            # TCPStore would retry a refused connection until its time is over, and print a trace.
            socket.create_connection((host, port), patience).close()
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=patience))
            if store.check(["token"]) and store.get("token").decode() == record["token"]:
                store.set_timeout(timedelta(seconds=timeout))
                return store
        except STORE_ERRORS:
            continue
    return None
