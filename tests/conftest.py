from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what trains first: these tests take up to 20 seconds, and no worker shall begin one when others are done."""
    items.sort(key=lambda item: item.path.parent.name != "train")
