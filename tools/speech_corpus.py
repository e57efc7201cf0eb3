"""Fetch a Debian package of recorded speech and unpack it into a folder; nothing is installed.

    python tools/speech_corpus.py FOLDER [PACKAGE]

The recordings are for `perfsuite data leak-audio OUT --from FOLDER`: 568 telephone prompts, 25 minutes, 17 MB, licensed
CC-BY-SA 3.0 (the licence is unpacked with them). The tool ends with exit code 1 and one line if the package cannot be
fetched: on a system other than Debian and Ubuntu, or without access to their archive.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "asterisk-core-sounds-en-wav"
TIMEOUT_S = 300


def fetch(folder: Path, package: str = PACKAGE) -> int:
    """Fetch the package, and return the number of WAV files in the folder; SystemExit with one line on failure."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SystemExit(f"speech_corpus: no {tool} here; this needs Debian or Ubuntu")
    try:
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)  # otherwise apt warns that its own user cannot read the folder
            _run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package], Path(name))
            (archive,) = Path(name).glob("*.deb")
            folder.mkdir(parents=True, exist_ok=True)
            _run(["dpkg-deb", "-x", str(archive), str(folder)], Path(name))
    except OSError as error:
        raise SystemExit(f"speech_corpus: cannot write {folder}: {error.strerror or error}; name another") from None
    found = sum(1 for _ in folder.rglob("*.wav"))
    if not found:
        raise SystemExit(f"speech_corpus: {package} has no WAV file; name another package")
    return found


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"speech_corpus: {command[0]} took more than {TIMEOUT_S} s; try again later") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SystemExit(
            f"speech_corpus: {' '.join(command[:1])}: {reason}; is the package archive set up and reachable?"
        )


def main() -> None:
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit("usage: python tools/speech_corpus.py FOLDER [PACKAGE]")
    folder = Path(sys.argv[1]).resolve()
    print(f"{fetch(folder, *sys.argv[2:])} recordings in {folder}")


if __name__ == "__main__":
    main()
