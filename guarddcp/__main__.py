"""``python -m guarddcp`` is the ``guarddcp`` command."""

import sys

from guarddcp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
