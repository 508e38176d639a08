"""``python -m capture`` is the ``capture`` command."""

import sys

from capture.cli.main import console

if __name__ == "__main__":
    sys.exit(console())
