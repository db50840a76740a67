"""The command's beginning, also `python -m lora_tool`: Ctrl-C while its modules are imported ends it without a traceback."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, as `cli.main.main` does; until that is imported, Ctrl-C ends the process as it ends others."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background may ignore it
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lora_tool.cli.main import main as run

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
