"""What can be wrong with the files of a mixture's experts, found in names and shapes alone."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.display import some
from lora_tool.formats.expert_files import file_name, layout, number_of
from lora_tool.formats.zero import ZeroTag
from lora_tool.report import Finding
from lora_tool.sharded.faults import COPY, another_save, fault, moved_files, odd_ones_out


def expert_faults(tag: ZeroTag) -> Iterator[Finding]:
    """Yield what is wrong with the files of experts: LT401, LT403, LT404, LT407.

    Two that hold the same are no copies for that: experts may begin as one, and stay frozen.
    """
    counts = tag.first.experts if tag.first else ()
    broken = {problem.path for problem in tag.problems}
    for layer, count in enumerate(counts):
        places = [(layer, number) for number in range(count)]
        lost = [
            place[1]
            for place in places
            if place not in tag.experts and str(tag.folder / file_name(place)) not in broken
        ]
        if lost:
            one = f"file of expert {lost[0]} is" if len(lost) == 1 else f"files of experts {some(lost)} are"
            message = f"the {one} missing: mixture {layer} has {count} experts, with a file for each"
            yield fault("LT401", tag.folder, message, hint=COPY)
    moved = list(moved_files(expert.file for expert in tag.experts.values()))
    yield from moved
    told = {finding.path for finding in moved}
    for (layer, number), expert in tag.experts.items():
        other = next((held for held in map(number_of, expert.tensors) if held != number), number)
        if tag.first and (layer >= len(counts) or number >= counts[layer]):
            message = f"is of expert {number} of mixture {layer}, which the module does not have"
            yield fault("LT403", expert.path, message, hint="it is from another run: move it away")
        elif other != number and str(expert.path) not in told:
            yield fault(
                "LT404", expert.path, f"holds the weights of expert {other}", hint="copy the experts' files again"
            )
    for layer in range(len(counts)):
        layouts = {each.path: layout(each) for (at, _), each in tag.experts.items() if at == layer}
        for path, _, _ in odd_ones_out(layouts):
            if str(path) not in told:
                hint = f"it is from another run: copy this run's again, or {another_save(tag.folder)}"
                yield fault("LT407", path, "holds other tensors than the files of the other experts", hint=hint)
