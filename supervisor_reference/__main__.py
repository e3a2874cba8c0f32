"""Entry point: ``python -m supervisor_reference``."""

from __future__ import annotations

import sys

from supervisor_reference.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
