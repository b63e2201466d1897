"""Fixtures that the tests of core and of every plugin share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yield real rank processes, started when first asked for; see `support.pool`."""
    with RankPool() as pool:
        yield pool
