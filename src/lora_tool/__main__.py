"""`python -m lora_tool` is `lora-tool`."""

from lora_tool.cli.main import main

if __name__ == "__main__":
    main()
