"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dspark_jax


def test_every_public_name_can_be_imported():
    for name in dspark_jax._PUBLIC:
        assert getattr(dspark_jax, name).__name__ == name
        assert name in dir(dspark_jax)


def test_importing_the_package_does_not_import_jax():
    code = "import sys, dspark_jax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'generate_everything'"):
        dspark_jax.generate_everything  # noqa: B018
