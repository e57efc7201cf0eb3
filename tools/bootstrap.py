"""Choose the Python that `make` runs with, set it up where needed, and print its path. Standard library only.

1. PERFSUITE_PYTHON, if set, is used as it is.
2. .venv is used if it was set up for the present pyproject.toml and constraints.txt.
3. Otherwise .venv is created. If the current Python can import torch (a GPU container, the user's own environment),
   .venv sees that Python's packages, and torch and triton are never installed or changed.

Progress and errors go to stderr, one line each. The syntax of this file must stay that of Python 3.8, so that an old
Python prints an error message and not a SyntaxError. The oldest supported version is OLDEST here; pyproject.toml, the
Makefile, the workflows and the README name it, too.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = "perfsuite.stamp"
LOG = "bootstrap.log"
NEWER = ("python3.13", "python3.12", "python3.11")

# Extras of pyproject.toml; INSPECT names them too.
EXTRAS = "test,train,history"
# The tests run without these packages. `make check`, figures, packaging and parallel tests need them, and so do a few
# tests of the trainers and of the history, which are skipped without them.
OPTIONAL = {
    "mypy",
    "ruff",
    "matplotlib",
    "build",
    "pytest-xdist",
    "h5py",
    "jsonargparse",
    "pyyaml",
    "ruptures",
    "soundfile",
    "safetensors",
    "tensorboard",
    "tokenizers",
}
NO_INDEX = "the package index cannot be reached"
# These depend on the GPU driver and on each other, so a container's versions are kept.
KEEP = ("torch", "triton")
# pip options to install a package that the set-up can do without. On a machine without network, pip's default of five
# retries takes minutes.
HASTY = ("--retries", "1", "--timeout", "20")

# A program that the environment's own Python runs, to find the requirements of pyproject.toml that it lacks. The module
# packaging is imported from pip, which bundles it.
INSPECT = r"""
import importlib.metadata, json, sys, tomllib
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import InvalidVersion, Version
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
lines = [*project["dependencies"], *extras["test"]]
lines += [line for name in ("train", "history") for line in extras.get(name, [])]
found = {}
for d in importlib.metadata.distributions():
    try:
        found.setdefault(canonicalize_name(d.metadata["Name"]), str(Version(d.version)))
    except (InvalidVersion, TypeError, AttributeError):
        pass  # a damaged or ancient package, which pip does not see either
wanted = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": "test"})]
lacking = [r for r in wanted if not (
    canonicalize_name(r.name) in found and r.specifier.contains(found[canonicalize_name(r.name)], prereleases=True))]
build = [r for r in map(Requirement, tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"])
         if not (r.name in found and r.specifier.contains(found[r.name], prereleases=True))]
print(json.dumps({
    "lacking": {canonicalize_name(r.name): str(r) for r in lacking}, "installed": found, "can_build": not build,
}))
"""


def fail(message):
    """Print one line, and end with exit code 1."""
    say(message)
    raise SystemExit(1)


def say(message):
    """Print one line of progress to stderr."""
    sys.stderr.write(f"bootstrap: {message}\n")
    sys.stderr.flush()


def main():
    chosen = os.environ.get("PERFSUITE_PYTHON")
    if chosen:
        print(check_chosen(chosen))
        return
    if sys.version_info < OLDEST:
        newer = next((p for p in map(shutil.which, NEWER) if p and version_of(p) >= OLDEST), None)
        if newer is None:
            here = dotted(sys.version_info[:2])
            fail(f"Python {here} is too old; install Python {dotted(OLDEST)} or newer, or name one in PERFSUITE_PYTHON")
        raise SystemExit(subprocess.run([newer, os.path.abspath(__file__)]).returncode)
    with locked():
        if not is_ready(VENV):
            set_up(VENV)
    print(python_of(VENV))


def check_chosen(path):
    """Return the path of the interpreter that the user named, after checking that it runs and is new enough."""
    found = shutil.which(path)
    if found is None:
        fail(f"PERFSUITE_PYTHON={path} is not an executable; unset it or name a Python {dotted(OLDEST)} or newer")
    version = version_of(found)
    if version < OLDEST:
        fail(f"PERFSUITE_PYTHON={path} is Python {dotted(version) or '?'}; name one of {dotted(OLDEST)} or newer")
    return found


def version_of(python):
    """Return an interpreter's version, e.g. (3, 12); () if it does not run."""
    code = "import sys; print('%d %d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def dotted(version):
    return ".".join(map(str, version))


def python_of(venv):
    return venv / "bin" / "python"


def stamp():
    """Return a digest of the files on which .venv depends; if it changes, .venv must be set up again."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_ready(venv):
    """Return whether .venv was set up for the present requirements and its interpreter still runs."""
    try:
        return (venv / STAMP).read_text() == stamp() and version_of(python_of(venv)) >= OLDEST
    except OSError:
        return False


def set_up(venv):
    """Create or update .venv, and install perfsuite and its requirements in it."""
    create(venv, inherit=has_torch(sys.executable))
    log = venv / LOG
    log.write_text("")
    if inherits_torch(python_of(venv)):
        complete_inherited(venv, log)
    else:
        say(f"installing into .venv; about a minute, the log is .venv/{LOG}")
        constraints = ["-c", str(ROOT / "constraints.txt")]
        # The bundled pip may be years old and take twice as long. It suffices if no newer one can be installed.
        pip(venv, log, [*HASTY, *constraints, "--upgrade", "pip"])
        problem = pip(venv, log, [*constraints, "-e", f"{ROOT}[{EXTRAS}]"])
        if problem:
            fail(f"pip failed: {problem}; see .venv/{LOG}, and check the network or pip's index settings")
    (venv / STAMP).write_text(stamp())


def has_torch(python):
    """Return whether a Python has torch. torch is not imported: that takes seconds and may need the GPU."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def inherits_torch(python):
    """Return whether the torch of a virtual environment is installed outside it."""
    code = (
        "import importlib.util, os, sys; s = importlib.util.find_spec('torch'); "
        "sys.exit(not (s and s.origin and not s.origin.startswith(sys.prefix + os.sep)))"
    )
    return subprocess.run([str(python), "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def create(venv, inherit):
    """Create .venv, or keep an existing one that works; a broken one that this script created is created again."""
    if python_of(venv).exists() and version_of(python_of(venv)) >= OLDEST:
        say("bringing .venv up to date")
        pipless = run([str(python_of(venv)), "-m", "pip", "--version"]).returncode
        if pipless and run([str(python_of(venv)), "-m", "ensurepip"]).returncode:
            fail(".venv has no pip; remove .venv and try again")
        return
    if venv.exists() and not (venv / STAMP).exists() and any(venv.iterdir()):
        fail(f".venv exists, but has no working Python of {dotted(OLDEST)} or newer; remove it and try again")
    say(f"creating .venv with Python {dotted(sys.version_info[:2])}" + (", on top of its packages" if inherit else ""))
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    command += ["--system-site-packages"] if inherit else []
    done = run(command)
    if done.returncode and inherit:
        # Debian's python3 may lack python3-venv. A pip in .venv is not needed, because pip is inherited.
        done = run([*command, "--without-pip"])
    if done.returncode:
        shutil.rmtree(str(venv), ignore_errors=True)
        problem = last_line(done.stdout)
        if "ensurepip" in done.stdout or "No module named venv" in done.stdout:
            problem = "this Python cannot create environments"
        fail(f"{problem}; install its venv module, e.g. apt-get install python{dotted(sys.version_info[:2])}-venv")
    if inherit:
        inherit_environment(venv)
        if (site_packages(venv) / "setuptools").exists():
            # On Python 3.11 ensurepip installs a setuptools that is too old to build with and hides the inherited one.
            run([str(python_of(venv)), "-m", "pip", "uninstall", "-y", "setuptools"])


def inherit_environment(venv):
    """Make the packages of the current virtual environment visible in .venv. --system-site-packages shows only those of
    the Python from which that environment was created."""
    if sys.prefix == sys.base_prefix:
        return
    code = "import sysconfig; print(sysconfig.get_paths()['purelib']); print(sysconfig.get_paths()['platlib'])"
    folders = dict.fromkeys(run([sys.executable, "-c", code]).stdout.splitlines())
    # addsitedir also reads .pth files, which editable installs are.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in folders]
    site_packages(venv).joinpath("_inherited.pth").write_text("".join(lines))


def site_packages(venv):
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run([str(python_of(venv)), "-c", code]).stdout.strip())


def complete_inherited(venv, log):
    """Install the packages that an inherited environment lacks, and leave every installed package as it is."""
    done = run([str(python_of(venv)), "-c", INSPECT, str(ROOT / "pyproject.toml")])
    if done.returncode:
        fail(f"no pip in this Python ({last_line(done.stdout)}); install it, e.g. apt-get install python3-pip")
    facts = json.loads(last_line(done.stdout))
    for name in KEEP:
        tested = facts["lacking"].pop(name, None)
        if tested and name in facts["installed"]:
            say(f"{name} {facts['installed'][name]} is kept, though perfsuite was tested with {tested}")
    if facts["lacking"]:
        say(f"keeping torch {facts['installed'].get('torch')}, installing {', '.join(sorted(facts['lacking']))}")
        problem = install_lacking(venv, log, facts)
        needed = sorted(set(facts["lacking"]) - OPTIONAL)
        fatal = problem
        if problem and needed and problem != NO_INDEX:  # perhaps only an optional package is not available
            fatal = install_lacking(venv, log, {**facts, "lacking": {name: facts["lacking"][name] for name in needed}})
        if fatal and needed:
            remedy = f"install {', '.join(needed)} where this Python finds it, or check the network"
            fail(f"pip failed: {fatal}; {remedy}; see .venv/{LOG}")
        if problem:
            left_out = sorted(set(facts["lacking"]) & OPTIONAL)
            say(f"not installed ({problem}): {', '.join(left_out)}; tests that need them are skipped")
    isolation = ["--no-build-isolation"] if facts["can_build"] else []
    problem = pip(venv, log, [*HASTY, "--no-deps", *isolation, "-e", str(ROOT)])
    if problem:
        site_packages(venv).joinpath("perfsuite.pth").write_text(f"{ROOT}\n")
        say(f"perfsuite is not installed ({problem}) and is only on the path: no `perfsuite` script, no entry points")
        say("use `python -m perfsuite`, and pytest with `-p perfsuite.plugin`, as the Makefile does")


def install_lacking(venv, log, facts):
    """Install the missing packages in the tested versions; return pip's last error line, or None."""
    present = {name: v.partition("+")[0] for name, v in facts["installed"].items() if name not in facts["lacking"]}
    tested = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.partition("==")[0].strip().lower() in facts["lacking"]
    ]
    problem = None
    # First keep the versions of all installed packages. If pip finds no solution, keep only those of torch and triton.
    for kept in (present, {name: v for name, v in present.items() if name in KEEP}):
        with tempfile.TemporaryDirectory() as folder:
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text("\n".join([f"{name}=={version}" for name, version in kept.items()] + tested) + "\n")
            found = pip(venv, log, [*HASTY, "-c", str(constraints), *facts["lacking"].values()])
        if found is None:
            return None
        problem = problem or found
    return problem


def pip(venv, log, arguments):
    """Run pip install; return its last error line, or None."""
    # Python compiles a module at its first import; compiling all of torch takes a third of the installation time.
    options = ["--disable-pip-version-check", "--no-input", "--no-compile"]
    done = run([str(python_of(venv)), "-m", "pip", "install", *options, *arguments])
    with log.open("a") as file:
        file.write(f"$ pip install {' '.join(arguments)}\n{done.stdout}\n")
    if done.returncode == 0:
        return None
    if "NewConnectionError" in done.stdout or "ConnectTimeoutError" in done.stdout:
        return NO_INDEX
    errors = [line.replace("ERROR: ", "") for line in done.stdout.splitlines() if line.lstrip().startswith("ERROR")]
    # The last line says what failed, unless it only refers to pip's manual.
    causes = [line for line in errors if not line.startswith("ResolutionImpossible")]
    return last_line("\n".join(causes)) or last_line(done.stdout) or f"exit {done.returncode}"


def run(command):
    """Run a command, and return the finished process, with stdout and stderr together in `stdout`."""
    # With these variables, pip would install outside .venv.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    }
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


@contextlib.contextmanager
def locked():
    """Allow one bootstrap at a time: `make run` and `make test` may start together."""
    import fcntl

    try:
        folder = ROOT / ".perfsuite"
        folder.mkdir(exist_ok=True)
        file = (folder / "bootstrap.lock").open("w")
    except OSError as error:
        fail(f"{ROOT} cannot be written ({error.strerror}); make it writable, or set PERFSUITE_PYTHON")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; run it again to go on")
    except OSError as error:
        fail(f"{error}; fix that, or set PERFSUITE_PYTHON")
