from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# a machine that does other work at the same time is slow, and no test is wrong for that
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what trains first: these tests take up to 20 seconds, and no worker shall begin one when others are done."""
    items.sort(key=lambda item: item.path.parent.name != "train")
