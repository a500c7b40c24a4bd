"""The edge of the command: exit codes, errors in one line, encodings, pipes, completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpttool.cli.main import VERBS, main
from tests.ckpttool.cli.support import ROOT, asked_on_a_terminal, ckpttool, make_run, write_step


def test_version() -> None:
    done = ckpttool("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("ckpttool ")


def test_help_of_the_group() -> None:
    done = ckpttool("--help")
    assert done.returncode == 0
    for word in ("newest state that can be proven good", "Exit codes:", "130  interrupted", *VERBS):
        assert word in " ".join(done.stdout.split()) or word in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb: str) -> None:
    done = ckpttool(verb, "--help")
    assert done.returncode == 0
    assert f"\n    ckpttool {verb}" in done.stdout.partition("Examples:")[2]
    assert "--json" in done.stdout
    assert ckpttool(verb, "-h").stdout == done.stdout


@pytest.mark.parametrize(
    "arguments", [["frob"], ["verify", "--frob"], ["prune"], ["prune", ".", "--keep-last", "0"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    done = ckpttool(*arguments)
    assert done.returncode == 2
    assert "Error: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["verify"],
        ["latest"],
        ["fix-pointer"],
        ["prune", "--keep-last", "1"],
        ["rollback", "--to", "1"],
        ["undo"],
        ["history"],
        ["purge"],
        ["copy", "-", "x"],
    ],
)
def test_missing_path(tmp_path: Path, arguments: list[str]) -> None:
    missing = str(tmp_path / "no\x1b[31m\nwhere")
    rest = arguments[1:] if arguments[0] in ("prune", "rollback") else []
    command = [arguments[0], missing, *(["x"] if arguments[0] == "copy" else []), *rest]
    done = ckpttool(*command, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ckpttool: ")
    assert r"no\x1b[31m\nwhere: No such file or directory" in done.stderr
    done = ckpttool(*command, "--json", cwd=tmp_path)
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert list(document) == ["schema_version", "error", "exit_code"]
    assert document["error"]["path"] == missing
    assert document["exit_code"] == 3


def run_script(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


BROKEN_VERB = """
    import sys, types, click
    import ckpttool.cli.main as cli

    @click.command()
    def command():
        raise ZeroDivisionError("oh\\x1b no")

    sys.modules["ckpttool.cli.broken"] = types.SimpleNamespace(command=command)
    cli.VERBS["broken"] = "A verb with a bug."
    cli.main()
"""


def test_internal_error_is_one_line() -> None:
    done = run_script(BROKEN_VERB, "broken")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        "ckpttool: internal error: ZeroDivisionError: oh\\x1b no"
        " (please report; --traceback or CKPTTOOL_TRACEBACK=1 shows more)\n"
    )


def test_internal_error_with_traceback() -> None:
    for done in (
        run_script(BROKEN_VERB, "--traceback", "broken"),
        run_script(BROKEN_VERB, "broken", CKPTTOOL_TRACEBACK="1"),
    ):
        assert done.returncode == 3
        assert "Traceback" in done.stderr
        assert "internal error: ZeroDivisionError" in done.stderr


def test_only_the_verbs_module_is_imported(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    script = """
        import atexit, sys, click
        heavy = {"torch", "numpy", "ml_dtypes", "tempfile", "zipfile", "subprocess", "dataclasses"}
        heavy -= set(sys.modules)  # click brings some under Python 3.10
        from ckpttool.cli.main import main
        verbs = {"ckpttool.cli.verify", "ckpttool.cli.copy", "ckpttool.cli.prune"}
        atexit.register(lambda: print(sorted((heavy | verbs) & set(sys.modules)), file=sys.stderr))
        main()
    """
    done = run_script(script, "inspect", str(tmp_path / "step_000000000002.pt"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_reader_that_goes_away(tmp_path: Path) -> None:
    make_run(tmp_path, *range(300))
    command = [sys.executable, "-m", "ckpttool", "inspect", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 3)


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    with open("/dev/full", "w") as full:
        for arguments in (["inspect", tmp_path], ["inspect", tmp_path, "--json"], ["--help"]):
            for env in ({}, {"PYTHONUNBUFFERED": "1"}):
                done = ckpttool(
                    *arguments,
                    env={"PYTHONUNBUFFERED": "", **env},
                    capture_output=False,
                    stdout=full,
                    stderr=subprocess.PIPE,
                )
                assert done.returncode == 3
                assert done.stderr == "ckpttool: standard output: No space left on device\n"


def test_closed_output(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    command = f"exec {sys.executable} -m ckpttool inspect {tmp_path} >&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX"},
    ],
)
def test_names_that_the_locale_lacks(tmp_path: Path, env: dict[str, str]) -> None:
    run = tmp_path / os.fsdecode("тест_каталог 🙂 [1]\x1b\n\u202e".encode() + b"\xff")
    make_run(run, 2, 4, pointer=2)
    (run / os.fsdecode(b"stra\xffnge\x1b]0;title\x07")).write_bytes(b"x")
    path = os.fsencode(run)
    for arguments in (
        ["inspect", path],
        ["inspect", path, "--json"],
        ["verify", path],
        ["fix-pointer", path],
        ["prune", path, "--keep-last", "1", "--dry-run"],
        ["copy", path, os.fsencode(tmp_path) + b"/\xfe/"],
        ["inspect", os.fsencode(run / "step_000000000004.pt")],
    ):
        done = ckpttool(*arguments, env=env)
        assert done.returncode in (0, 1), done.stderr
        assert "internal" not in done.stderr
        shown = done.stdout + done.stderr
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown


def test_names_are_shown_as_they_are_where_they_can_be(tmp_path: Path) -> None:
    run = make_run(tmp_path / "тест_каталог é", 2)
    assert "тест_каталог é" in ckpttool("inspect", run, env={"LC_ALL": "C.UTF-8"}).stdout


def test_interrupt(tmp_path: Path) -> None:
    """SIGINT while the command waits for an answer on a terminal."""
    make_run(tmp_path, 1, 2, 3)
    prune = ("prune", tmp_path, "--keep-last", "1")
    process, master = asked_on_a_terminal(*prune, until=b"[y/N]")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert b"Traceback" not in os.read(master, 1000)
    os.close(master)
    assert len(list(tmp_path.glob("*.pt"))) == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = ckpttool(env={"_CKPTTOOL_COMPLETE": f"{shell}_source"})
    if shell == "bash" and "version" in done.stderr:  # pragma: no cover
        pytest.skip("this bash is too old for click")
    assert done.returncode == 0
    assert "_CKPTTOOL_COMPLETE" in done.stdout


def complete(*words: str) -> list[str]:
    line = " ".join(words)
    env = {
        "_CKPTTOOL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return ckpttool(env=env).stdout.splitlines()


def test_completion() -> None:
    assert complete("ckpttool", "fix") == ["plain,fix-pointer"]
    assert complete("ckpttool", "inspect", "--tre") == ["plain,--tree"]
    assert complete("ckpttool", "verify", "runs/") == ["file,runs/"]
    ids = complete("ckpttool", "explain", "PTR")
    assert len(ids) > 3
    assert all(line.startswith("plain,PTR") for line in ids)


@pytest.mark.parametrize(
    "arguments", [["verify", "--nope"], ["prune"], ["verify", ""], ["inspect", "a", "b", "c"]]
)
def test_wrong_usage_is_a_document_too(arguments: list[str]) -> None:
    done = ckpttool(*arguments, "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["exit_code"] == 2
    assert document["error"]["message"] in done.stderr
    assert ckpttool(*arguments).stdout == ""


def test_an_interrupt_is_a_document_too(tmp_path: Path) -> None:
    script = (
        "import ckpttool.actions.newest as n, ckpttool.cli.main as m\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "n.find_newest_valid = stop\n"
        f"m.main(['latest', {str(tmp_path)!r}, '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    document = json.loads(done.stdout)
    assert (document["exit_code"], document["error"]["message"]) == (130, "interrupted")


def test_a_verb_leaves_the_callers_signal_handlers_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    source = Path(__file__).parents[3] / "fixtures" / "healthy" / "step_000000000006.pt"
    done = CliRunner().invoke(main, ["slim", str(source), "-o", str(tmp_path / "out.pt")])
    assert done.exit_code == 0, done.output
    assert signal.getsignal(signal.SIGTERM) is before
