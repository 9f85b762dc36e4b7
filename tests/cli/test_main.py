"""The command line: subcommands, lazy imports, errors in one line."""

import subprocess
import sys
import types

import pytest

import dspark_jax
from dspark_jax.cli import main as cli


@pytest.fixture
def failing_subcommand(monkeypatch):
    """Replaces `version` by a subcommand that raises what the test puts into it."""
    module = types.ModuleType("failing_subcommand")
    monkeypatch.setitem(sys.modules, "failing_subcommand", module)
    monkeypatch.setitem(cli.SUBCOMMANDS, "version", cli.Subcommand("failing_subcommand", ""))

    def raise_on_call(error: BaseException) -> None:
        def version() -> None:
            raise error

        module.version = version  # type: ignore[attr-defined]

    return raise_on_call


def test_version_names_the_package_and_jax(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"dspark-jax {dspark_jax.__version__}, jax ")


def test_help_lists_every_subcommand(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("generate", "check", "train", "demo", "version"))


def test_no_subcommand_is_a_wrong_command_line():
    assert cli.main([]) == 2


def test_an_unknown_subcommand_is_named_beside_the_known_ones(capsys):
    assert cli.main(["serve"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown subcommand 'serve'")
    assert "generate" in error
    assert error.count("\n") == 1


def test_importing_the_command_line_does_not_import_jax():
    code = "import sys, dspark_jax.cli.main; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(cli.SUBCOMMANDS))
def test_every_subcommand_explains_its_flags(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"dspark {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [
        ValueError("top_k: found -1, expected at least 0"),
        FileNotFoundError("no such folder: target"),
        NotImplementedError("penalties are not yet supported"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(failing_subcommand, capsys, error):
    failing_subcommand(error)
    assert cli.main(["version"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_debug_lets_the_traceback_through(failing_subcommand):
    failing_subcommand(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["version", "--debug"])


def test_a_missing_optional_package_names_the_extra(failing_subcommand, capsys):
    failing_subcommand(ModuleNotFoundError("No module named 'grain'", name="grain"))
    assert cli.main(["version"]) == 2
    assert "dspark-jax[train]" in capsys.readouterr().err


def test_an_unexpected_error_is_not_swallowed(failing_subcommand):
    failing_subcommand(AssertionError("a bug"))
    with pytest.raises(AssertionError):
        cli.main(["version"])


def test_an_interrupt_ends_quietly(failing_subcommand):
    failing_subcommand(KeyboardInterrupt())
    assert cli.main(["version"]) == 130
