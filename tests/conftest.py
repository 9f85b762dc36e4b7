"""Settings of the whole suite: exact fp32 products, quick compilation, rare garbage collection."""

import gc
import os
import signal
from collections.abc import Iterator

import jax
import pytest

# Loops written by XLA's older emitters compile in less than half the time, and one core gains
# nothing from programs compiled in parts. Read when JAX first compiles; processes that tests
# start inherit it.
QUICK_TO_COMPILE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if QUICK_TO_COMPILE not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}".strip()


def pytest_configure() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    # tracebacks of every operation, of which no test reads one
    jax.config.update("jax_traceback_in_locations_limit", 0)


def collect_garbage() -> None:
    """Find garbage among what is new, and never search again what was kept.

    Compiled programs and their traces stay, and the more there are the longer a search takes: a
    twentieth of the suite's time at the usual thresholds.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.set_threshold(200_000, 20, 100)
    collect_garbage()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        collect_garbage()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Most tests compile for longer than they compute. The setting counts on the CPU alone.
    quick = jax.default_backend() == "cpu" and item.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def listening_to_ctrl_c() -> Iterator[None]:
    """Python's own SIGINT handler; a suite started in the background inherits none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
