"""The form of an adapter that each server takes, which `prepare` writes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, convert

from lora_tool.adapters.view import AdapterView
from lora_tool.core.doors import SERVERS, entry_points, load
from lora_tool.core.keys import split_layer
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.serving.classes import ModelClasses
from lora_tool.rules.serving.tables import known_version, record_of, table_of
from lora_tool.rules.serving.together import (
    ReadTogether,
    path_with,
)


class ServingForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters that a server reads, in one version. All but PEFT need one scaling, alpha / r."""

    name: str
    """Its name in messages."""
    server: Server | None = None
    """The built-in server that it is of."""
    word: str = ""
    """What `--for` has for it in commands."""
    version: str = ""
    """The version that this was read from; of an added server, unknown."""
    read: str = ""
    """The files that this was read from, in the source of that version."""
    run: str = ""
    """What it was tried with, where that is a run of the server."""
    one_rank: bool = True
    """Whether it has one rank for all modules."""
    ranks: tuple[int, ...] = ()
    """The ranks that can be the highest, where it is started with one."""
    default_rank: int = 0
    """The highest rank of an adapter where it is started without; 0 if any is taken."""
    heads: bool = False
    """Whether it takes heads of classifiers that were saved whole."""
    lora_on_heads: bool = False
    """Whether it takes LoRA on the head of a classifier; one that takes saved heads does."""
    whole: bool = False
    """Whether it takes all modules that were saved whole."""
    dora: bool = False
    """Whether it computes DoRA with the magnitudes of the adapter."""
    fused: bool = False
    """Whether it reads LoRA on fused experts as PEFT packs it."""
    some_models: bool = False
    """Whether LoRA on ends and on parameters depends on the model."""
    experts: bool = False
    """Whether it reads LoRA on experts one by one."""
    whole_models: bool = False
    """Whether it loads the whole of a multimodal model, so that LoRA on only the text model has other paths there."""
    mlx: bool = False
    """Whether factors are transposed, under names of its own."""
    regex: bool = True
    """Whether `target_modules` may be a regular expression."""
    fields: Mapping[str, str] = {}
    """Fields of adapter_config.json with what it does not apply → its reaction, a verb: "refuses" where the field is enough."""
    refused: Mapping[str, frozenset[str]] = {}
    """Model type → the last parts of the names of modules on which it refuses LoRA."""
    together: ReadTogether | None = None
    """The modules whose LoRA it reads only together."""
    gguf: bool = False
    """Whether it reads a file of its own, with the names of its base's file and one alpha."""
    language_alone: bool = False
    """Whether it leaves out LoRA outside of a multimodal model's language model, whatever it is started with."""
    towers: str = ""
    """The option that it is started with to have LoRA outside of the language model."""
    unwrapped: bool = False
    """Whether it leaves out LoRA on the one matrix of multi-query attention; see `packed_queries`."""
    one_end: bool = False
    """Whether LoRA on an embedding that is also the output layer changes both, and the output layer has no own."""
    modules: Mapping[str, Mapping[str, str | None]] = {}
    """Model type, or "" for any → part of a module's path in transformers 5 → what the server has there, None where it
    applies no LoRA; see `path_with`.
    """
    adapter_names: bool = True
    """Whether it reads names of tensors with the name of the adapter, `lora_A.default.weight`."""
    bare_names: bool = False
    """Whether it reads names of tensors without `base_model.model.`."""
    classes: ModelClasses | None = None
    """The models that it knows, where what it takes depends on them."""
    start: str = ""
    """What is typed to serve an adapter, with places for {name}, "name=path", {path}, {rank} and {towers}."""

    def names(self, types: Iterable[str]) -> Mapping[str, str | None]:
        """Return what it calls the modules of a model of the first of these types that it has a row of, and of any."""
        own = next((self.modules[each] for each in types if each in self.modules), {})
        return {**own, **self.modules.get("", {})}

    def may_rename(self, modules: Iterable[str]) -> bool:
        """Return whether it calls one of the modules otherwise, in a model of some type."""
        return any(path_with(each, names) not in (each, None) for names in self.modules.values() for each in modules)

    def rank_option(self, rank: int) -> int:
        """Return the lowest rank that it can be started with and that takes an adapter of this one."""
        return next((each for each in self.ranks if each >= rank), rank)


def _newest(server: Server) -> ServingForm:
    """Return what the newest version of a built-in server takes."""
    return convert(
        {"name": table_of(server)["name"], "server": server, "word": server} | record_of(server), ServingForm
    )


FORMS: Mapping[Server, ServingForm] = {server: _newest(server) for server in Server}
"""What the newest versions take."""


class AddedServer(Struct, frozen=True, kw_only=True):
    """A server that another package adds by an entry point of `lora_tool.servers`, whose name is that in `--for NAME`.

    Its module registers the server's rules, which ask whether NAME is in `subject.servers`.
    """

    form: ServingForm


def form_of(server: str) -> ServingForm:
    """Return what a server takes, by a word as `server_named` returns it; its `name` has the version if the word does.

    Raises `KeyError` for one that `server_named` does not know.
    """
    name, at, version = server.partition("@")
    if name not in FORMS:
        return load(entry_points(SERVERS)[name], AddedServer).form
    newest = FORMS[Server(name)]
    if not at:
        return newest
    known = known_version(name, version)
    more = {"name": f"{newest.name} {known}", "server": name, "word": server}
    return convert(record_of(name, known) | more, ServingForm)


USUAL_LAYERS = ("model.layers", "language_model.model.layers", "backbone.layers")
"""Where nearly all of MLX-LM's classes have their layers, as transformers' classes with an output layer do."""


def has_usual_names(view: AdapterView, form: ServingForm) -> bool:
    """Return whether the server calls all modules with LoRA as the adapter does, whatever the base is."""
    paths = [each.target for each in view.layers]
    usual = not form.mlx or all(layers_of(path) in USUAL_LAYERS for path in paths if split_layer(path)[0] is not None)
    return usual and not form.may_rename(paths)


def layers_of(module: str) -> str:
    """Return the path of the list of layers that the module is in."""
    return split_layer(module)[1].partition(".*")[0]
