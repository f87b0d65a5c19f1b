import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that look at what others launched last."""
    items.sort(key=lambda item: "launched" in getattr(item, "fixturenames", ()))
