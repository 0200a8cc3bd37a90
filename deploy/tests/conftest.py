"""One fixture: every set of manifests."""

from __future__ import annotations

import pytest

from deploy.tests.rendering import SETS, Rendered, rendered


@pytest.fixture(params=SETS)
def manifests(request: pytest.FixtureRequest) -> Rendered:
    """Give every set of manifests in turn."""
    return rendered(request.param)
