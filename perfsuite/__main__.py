"""`python -m perfsuite`: the command line. It also works where the `perfsuite` script is not on PATH."""

from __future__ import annotations

from perfsuite.cli import main

if __name__ == "__main__":
    main(prog_name="perfsuite")
