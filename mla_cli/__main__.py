"""`mla` and `python -m mla_cli`: the program from its first moment on."""

import _signal as signal  # what is inside the module of that name, which takes its time to be imported
import os
import sys


def run() -> int:
    """Run `mla` and return its exit code; an interruption while the commands are still being imported is silent."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise it is ignored, and stays so
        signal.signal(signal.SIGINT, _leave)
    try:
        from mla_cli.app import main

        signal.signal(signal.SIGINT, before)
        return main()
    except KeyboardInterrupt:  # before or after `main` listens
        return 130


def _leave(number: int, frame: object) -> None:
    # Not an exception, which could come out of any module that is half imported; there is nothing yet to clean up.
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(run())
