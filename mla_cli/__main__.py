"""`python -m mla_cli`."""

import sys

from mla_cli.app import main

sys.exit(main())
