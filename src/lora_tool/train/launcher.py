"""`accelerate launch`, without its list of the values that nobody gave: a run says what is in effect when it begins."""

import logging
import sys

from accelerate.commands.launch import main

if __name__ == "__main__":
    said = logging.getLogger("accelerate.commands.launch")
    said.addFilter(lambda record: "values were not passed" not in record.getMessage())
    try:
        main()
    except KeyboardInterrupt:  # lora-tool says so
        sys.exit(130)
