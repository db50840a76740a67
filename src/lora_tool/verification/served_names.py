"""Which of the models that a server lists is the adapter, and which is its base."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from msgspec import Struct

from lora_tool.core.display import printable, some
from lora_tool.core.errors import PlanError, ServerError
from lora_tool.rules.engine.subjects import Server
from lora_tool.verification.openai_server import OpenAIServer

_LISTED = 1000


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model of a server: its name, and the fields of a request that ask it."""

    name: str
    fields: Mapping[str, Any]
    program: str | None = None
    """The server's program, as `--for` calls it; None for one that is unknown."""


_PROGRAMS = {"vllm": Server.VLLM, "sglang": Server.SGLANG, "llamacpp": Server.LLAMA_CPP}
"""`owned_by` of an entry of a server's list → the server that writes this."""


class ListedModel(Struct, frozen=True, kw_only=True):
    """One entry of a server's list: `root` is the path or id that it was loaded from, `parent` an adapter's base."""

    id: str
    root: str | None = None
    parent: str | None = None
    owner: str = ""


def served_models(
    server: OpenAIServer, places: Collection[str], base_places: Collection[str], wanted: str | None
) -> tuple[ServedModel, ServedModel]:
    """Return the adapter and its base, as the server has them.

    The adapter is the one called `wanted`; without it the one that was loaded from one of the `places`, or the only
    one. A base that the list does not tell is known by the `base_places`. Raises `PlanError` listing the names where
    they do not tell which is meant, and `ServerError` for a list in no form that is known.
    """
    cards = _cards(server)
    if any(card.owner == "llamacpp" for card in cards):
        return _of_llama_cpp(server, cards[0].id, wanted)
    adapter = _adapter_among(cards, _places(places), _places(base_places), wanted, server.url)
    base = _base_of(adapter, cards, _places(base_places), server.url)
    # SGLang takes an adapter's name alone for another name of the base
    asked = f"{base}:{adapter.id}" if adapter.owner == "sglang" and adapter.parent else adapter.id
    return _named(asked, cards[0]), _named(base, cards[0])


def _named(name: str, card: ListedModel) -> ServedModel:
    return ServedModel(name=printable(name), fields={"model": name}, program=_PROGRAMS.get(card.owner))


def _cards(server: OpenAIServer) -> list[ListedModel]:
    answer = server.get("/v1/models")
    try:
        cards = [
            ListedModel(
                id=str(each["id"]),
                root=each.get("root"),
                parent=each.get("parent"),
                owner=str(each.get("owned_by")),
            )
            for each in answer["data"][:_LISTED]
        ]
    except (AttributeError, LookupError, TypeError):
        cards = []
    if not cards:
        raise ServerError(f"{server.url}/v1/models lists no models", hint="give an OpenAI-compatible server")
    return cards


def _places(given: Collection[str]) -> frozenset[str]:
    """Return the ids and the paths, those of folders here as they really are."""
    return frozenset(os.path.realpath(each) if Path(each).exists() else each for each in given)


def _is_at(card: ListedModel, places: frozenset[str]) -> bool:
    return bool(places & _places([each for each in (card.root, card.id) if each]))


def _adapter_among(
    cards: Sequence[ListedModel], places: frozenset[str], base_places: frozenset[str], wanted: str | None, url: str
) -> ListedModel:
    if wanted is not None:
        base, colon, _ = wanted.partition(":")
        parent = base if colon and any(card.id == base for card in cards) else None
        unlisted = ListedModel(id=wanted, parent=parent)  # a server may load it when it is asked
        return next((card for card in cards if card.id == wanted), unlisted)
    adapters = [card for card in cards if card.parent]
    here = [card for card in cards if _is_at(card, places)]
    names = {PurePath(place).name for place in places}
    called = [card for card in adapters if PurePath(card.root or card.id).name in names]  # the path in a container
    others = [card for card in cards if not _is_at(card, base_places)]
    found = next((some_of for some_of in (here, called if len(called) == 1 else [], adapters, others) if some_of), [])
    if len(found) == 1 and len(cards) > 1:
        return found[0]
    if len(cards) == 1 or not found:
        raise PlanError(
            f"{url} serves {_list(cards)} and no adapter",
            hint="start the server with the adapter: vllm serve BASE --enable-lora --lora-modules NAME=ADAPTER",
        )
    raise PlanError(
        f"{url} serves {_list(found)}, and its list does not tell which is the adapter",
        hint=f'name it: `served_name="{printable(found[0].id)}"`',
    )


def _base_of(adapter: ListedModel, cards: Sequence[ListedModel], base_places: frozenset[str], url: str) -> str:
    if any(card.id == adapter.parent for card in cards):  # vLLM lets users say what they like
        return str(adapter.parent)
    others = [card for card in cards if not card.parent and card.id != adapter.id]
    here = [card for card in others if _is_at(card, base_places)]
    if here or len({card.root or card.id for card in others}) == 1:  # one model may have several names
        return (here or others)[0].id
    raise PlanError(
        f"{url} serves {_list(cards)}, and its list does not tell which is the base of `{printable(adapter.id)}`",
        hint="name the base as the server does: `base=MODEL`",
    )


def _list(cards: Sequence[ListedModel]) -> str:
    return some([f"`{printable(card.id)}`" for card in cards])


def _of_llama_cpp(server: OpenAIServer, model: str, wanted: str | None) -> tuple[ServedModel, ServedModel]:
    """Return the adapter with the scale that the server gives it, and the same with scale 0: both are one model."""
    listed = server.get("/lora-adapters")
    try:
        loaded = {int(each["id"]): (Path(each["path"]), float(each["scale"])) for each in listed}
    except (LookupError, TypeError, ValueError):
        loaded = {}
    found = [at for at, (path, _) in loaded.items() if wanted in (None, str(at), str(path), path.name, path.stem)]
    if not loaded:
        raise PlanError(f"{server.url} serves no adapter", hint="start it with the adapter: llama-server --lora FILE")
    if len(found) != 1:
        names = [f"`{printable(path.name)}`" for path, _ in loaded.values()]
        raise PlanError(
            f"{server.url} serves the adapters {some(names)}",
            hint=f'name one: `served_name="{printable(next(iter(loaded.values()))[0].name)}"`',
        )
    [at] = found
    path, scale = loaded[at]
    named = ((path.name, scale), (model, 0.0))
    adapter, base = (
        ServedModel(
            name=printable(name),
            fields={"model": model, "lora": [{"id": at, "scale": factor}]},
            program=Server.LLAMA_CPP,
        )
        for name, factor in named
    )
    return adapter, base
