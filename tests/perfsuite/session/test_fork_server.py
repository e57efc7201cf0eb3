"""Tasks run in forks of a server: each starts in the same state, and can only end itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scratch import ROOT

from perfsuite.session.fork_server import GONE, Command, Forks

LIMIT_S = 120.0

TASK = """
import os, pathlib, signal, sys, time, colorsys

def main(what, *more):
    if what == "say":
        print(sys.argv[1:], os.getcwd(), os.environ.get("OWN"), __name__, sys.stdin.read() == "")
        print("to stderr", file=sys.stderr)
    elif what == "leave":  # something behind, for the next task
        print(hasattr(colorsys, "left"), os.environ.get("LEFT"))
        colorsys.left, os.environ["LEFT"] = True, "1"
    elif what == "fail":
        raise ValueError("no such thing")
    elif what == "exit":
        sys.exit(int(more[0]))
    elif what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "hang":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path("ids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    elif what == "read":
        print(os.read(int(os.environ["GIVEN"]), 100).decode())
    elif what == "server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

main(*sys.argv[1:])
"""


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    (tmp_path / "task_of_a_test.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Forks("os:getpid", os.environ)
    yield made
    made.close()


def command(folder: Path, log: Path, *arguments: str, module: str = "task_of_a_test", **environment: str) -> Command:
    return Command(module=module, arguments=arguments, cwd=folder, environment={**os.environ, **environment}, log=log)


def run(forks: Forks, folder: Path, *arguments: str, seconds: float = LIMIT_S, **environment: str) -> tuple[int, str]:
    log = folder / "log.txt"
    code = forks.run(command(folder, log, *arguments, **environment), seconds)
    return code, log.read_text()


def test_a_task_has_its_own_arguments_folder_environment_and_output(forks: Forks, tmp_path: Path) -> None:
    code, text = run(forks, tmp_path, "say", "a b", OWN="mine")
    assert code == 0
    assert text.splitlines() == [f"['say', 'a b'] {tmp_path} mine __main__ True", "to stderr"]


def test_task_does_not_see_changes_made_by_another_task(forks: Forks, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(forks, tmp_path, "leave") == (0, "False None\n")


def test_exit_codes_are_those_of_a_process(forks: Forks, tmp_path: Path) -> None:
    assert run(forks, tmp_path, "exit", "3")[0] == 3
    code, text = run(forks, tmp_path, "fail")
    assert code == 1
    assert text.splitlines()[-1] == "ValueError: no such thing"
    assert run(forks, tmp_path, "crash")[0] == -signal.SIGSEGV
    assert run(forks, tmp_path, "exit", "0")[0] == 0


def test_hanging_task_is_killed_with_its_child_processes(forks: Forks, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(forks, tmp_path, "hang", seconds=2.0)
    if (tmp_path / "ids").exists():  # unless this machine is so slow that it had not begun
        for id in (tmp_path / "ids").read_text().split():
            assert gone(int(id))
    assert run(forks, tmp_path, "exit", "5")[0] == 5


def test_next_task_gets_a_new_server_if_one_was_killed(forks: Forks, tmp_path: Path) -> None:
    assert run(forks, tmp_path, "server")[0] == GONE
    assert run(forks, tmp_path, "exit", "6")[0] == 6


def test_concurrent_tasks_get_their_own_file_descriptors(forks: Forks, tmp_path: Path) -> None:
    logs, started = [tmp_path / f"log{n}" for n in range(3)], []
    writers = []
    for log in logs:
        reader, writer = os.pipe()
        writers.append(writer)
        started.append(forks.start(command(tmp_path, log, "read"), ("GIVEN", reader)))
        os.close(reader)
    for number in (2, 0, 1):  # each task waits only for its own line
        os.write(writers[number], f"line {number}".encode())
        assert started[number].wait(LIMIT_S) == 0
        os.close(writers[number])
    assert [log.read_text() for log in logs] == ["line 0\n", "line 1\n", "line 2\n"]


def test_task_killed_while_its_server_prepares_has_ended(tmp_path: Path) -> None:
    forks = Forks("time:sleep", os.environ)  # the call without an argument raises after a moment
    fork = forks.start(command(tmp_path, tmp_path / "log", module="os"))
    fork.kill()
    assert fork.poll() == GONE


def test_server_that_does_not_start_is_reported_by_the_exit_code(tmp_path: Path) -> None:
    forks = Forks("no_such_module:nothing", os.environ)
    assert forks.run(command(tmp_path, tmp_path / "log", module="os"), LIMIT_S) == GONE


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "task_of_a_test.py").write_text(TASK)
    code = f"""
import os, pathlib, signal
from perfsuite.session.fork_server import Command, Forks
forks = Forks("os:getpid", os.environ)
folder = pathlib.Path({str(tmp_path)!r})
task = dict(module="task_of_a_test", arguments=["exit", "0"], cwd=folder, environment=dict(os.environ))
forks.run(Command(**task, log=folder / "log"), {LIMIT_S})
print(forks._server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))


def test_task_is_a_separate_process_if_fork_is_unavailable(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    assert run(forks, tmp_path, "exit", "3")[0] == 3
    assert forks._server is None


def gone(id: int) -> bool:
    """Return whether a process has ended; the system may take a moment to remove it."""
    for _ in range(600):
        try:
            os.kill(id, 0)
            state = Path(f"/proc/{id}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False
