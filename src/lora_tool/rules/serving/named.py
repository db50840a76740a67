"""The servers by their names: the built-in ones, and those that other packages add."""

from __future__ import annotations

from lora_tool.core.choices import wrong_value
from lora_tool.core.doors import SERVERS, entry_points, load
from lora_tool.core.errors import WrongValue
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.serving.tables import known_version

SERVER_NAMES = f"[{'|'.join((*Server, 'NAME'))}]"
"""How help texts list the servers: NAME is one that another package adds."""


def server_named(given: object) -> str:
    """Return the server of this name, a `Server` where it is built in; one that is added has registered its rules.

    After `@` may stand a version of a built-in one, which the word then keeps: `vllm@0.32`. Raises `WrongValue`,
    `BrokenPlugin`.
    """
    word, at, version = str(given).partition("@")
    try:
        server = Server(word)
    except WrongValue:
        name, added = str(given).lower(), entry_points(SERVERS)
        if name not in added:
            raise wrong_value("server", given, (*map(str, Server), *added)) from None
    else:
        if not at:
            return server
        known_version(server, version)
        return f"{server}@{version}"
    from lora_tool.rules.serving.forms import AddedServer  # what a form needs is slow to import

    load(added[name], AddedServer)
    return name


def known_servers() -> tuple[str, ...]:
    """Return the names of all servers."""
    return (*(server.value for server in Server), *entry_points(SERVERS))
