"""The command line: exit codes, messages, and what reaches the handlers."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from guarddcp.cli.main import main
from guarddcp.errors import IntegrityError


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["restore"], "invalid choice: 'restore'"),
        (["verify"], "the following arguments are required: PATH"),
        (["inspect", "a", "b"], "unrecognized arguments: b"),
        (["verify", "a", "--storage-options", "{"], "not JSON"),
        (["verify", "a", "--storage-options", "[1]"], "expected a JSON object, got [1]"),
        (["demo", "--steps", "0"], "expected a whole number >= 1, got 0"),
        (["demo", "--horizon", "soon"], "expected a whole number >= 1, got soon"),
        (["demo", "--size", "huge"], "invalid choice: 'huge'"),
        (["bench"], "the following arguments are required: WHAT"),
        (["bench", "codec", "state.pt"], "unrecognized arguments: state.pt"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, argv, words):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_an_impossible_guard_is_wrong_usage(capsys):
    assert main(["demo", "--tolerance", "2"]) == 2
    assert "tolerance must be in (0, 1), not 2.0" in capsys.readouterr().err


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the modules behind the subcommands; what they were called with."""
    seen = []

    def stand_in(name, *functions):
        module = types.ModuleType(name)
        for function in functions:
            setattr(module, function, lambda *args, _name=function, **kwargs: seen.append((_name, args, kwargs)) or 0)
        monkeypatch.setitem(sys.modules, name, module)

    stand_in("guarddcp.cli.show", "run_inspect", "run_verify")
    stand_in("guarddcp.cli.bench", "run_bench_codec")
    stand_in("guarddcp.cli.demo", "run_demo")
    return seen


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_path_commands(calls, command):
    assert main([command, "s3://b/run", "--json", "--storage-options", '{"anon": true}']) == 0
    assert main([command, "run"]) == 0
    assert calls == [
        (f"run_{command}", ("s3://b/run",), {"as_json": True, "storage_options": {"anon": True}}),
        (f"run_{command}", ("run",), {"as_json": False, "storage_options": None}),
    ]


def test_bench_codec_takes_several_states(calls):
    assert main(["bench", "codec", "--state", "a.pt", "--state", "b.pt"]) == 0
    assert main(["bench", "codec", "--json"]) == 0
    assert calls == [
        ("run_bench_codec", (["a.pt", "b.pt"],), {"as_json": False}),
        ("run_bench_codec", ([],), {"as_json": True}),
    ]


def test_demo_arguments_reach_the_guard(calls):
    assert main(["demo", "--tolerance", "0.1", "--horizon", "7", "--steps", "3"]) == 0
    ((_, _, arguments),) = calls
    assert (arguments["guard"].tolerance, arguments["guard"].horizon) == (0.1, 7)
    assert (arguments["steps"], arguments["more"], arguments["size"]) == (3, 50, "demo")
    assert main(["demo"]) == 0
    assert (calls[1][2]["guard"].tolerance, calls[1][2]["guard"].horizon) == (0.01, "all")


def test_our_errors_are_one_message_and_exit_code_1(calls, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise IntegrityError("the manifest is torn", where="run/.metadata", hint="Restore an older checkpoint.")

    monkeypatch.setattr(sys.modules["guarddcp.cli.show"], "run_verify", refuse)
    assert main(["verify", "run"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "guarddcp: IntegrityError: run/.metadata: the manifest is torn. Restore an older checkpoint.\n"
    )


def test_module_is_the_command_and_help_loads_no_torch():
    script = "import sys; from guarddcp.cli.main import main; main(['--help'])"
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], capture_output=True, text=True, check=True
    )
    module = subprocess.run([sys.executable, "-m", "guarddcp", "--help"], capture_output=True, text=True, check=True)
    assert module.stdout == shown.stdout
    assert "demo" in shown.stdout
    assert "guarddcp.cli.main" in shown.stderr
    loaded = {line.rsplit("|", 1)[-1].strip() for line in shown.stderr.splitlines()}
    assert not loaded & {"torch.distributed.checkpoint", "numba"}


def test_a_reader_that_leaves_early_is_no_traceback():
    script = "import sys; from guarddcp.cli import main as m; sys.exit(m.main(['demo']))"
    stand_in = "import sys, types; d = types.ModuleType('d'); d.run_demo = lambda **_: print('x' * 10**6) or 0; "
    script = stand_in + "sys.modules['guarddcp.cli.demo'] = d; " + script
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
