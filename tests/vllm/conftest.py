"""Two real vLLM engines for all tests of this folder, which `make test-vllm` runs and `make test` does not."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it out; tests import `engines` and `driver`
pytest.register_assert_rewrite("driver")

from engines import PYTHON, Engine, build_tiny_model  # noqa: E402

MAX_STARTS = 6
"""A start takes half a minute or more: tests that kill engines are few."""
BLOCKS = 257
"""The least for a request of the model's full length, so that an engine is filled soon."""
MAX_NUM_SEQS = 16
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
"""Of the second engine: it parses its chats. The first one's are what streams are compared with."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder get the marker `vllm`, so that none can be left without it."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("vllm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the engines' logs."""
    report = yield
    if report.failed:
        for engine in getattr(item, "funcargs", {}).get("engines", ()):
            report.sections.append((engine.log.name, engine.log_end()))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    if not PYTHON.exists():
        pytest.fail(f"no {PYTHON}: run the tests by `make test-vllm`", pytrace=False)
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    size = {"blocks": BLOCKS, "max_num_seqs": MAX_NUM_SEQS}
    pair = (Engine(tiny_model, folder, core=0, **size), Engine(tiny_model, folder, core=1, flags=TOOLS, **size))
    try:
        for engine in pair:
            engine.launch()
        for engine in pair:
            engine.wait_ready()
        yield pair
    finally:
        for engine in pair:
            engine.stop()
    assert sum(engine.starts for engine in pair) <= MAX_STARTS


@pytest.fixture
def engines(shared_engines: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Two engines that run, without requests and with empty prefix caches; a test may kill either."""
    for engine in shared_engines:
        if not engine.alive:
            engine.kill()
            engine.start()
        engine.reset()
    return shared_engines
