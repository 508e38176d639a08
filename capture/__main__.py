"""``python -m capture`` is the ``capture`` command."""

import sys

from capture.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
