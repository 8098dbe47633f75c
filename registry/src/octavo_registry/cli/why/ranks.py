"""What `octavo why moe --ranks` says: what a front end's MoE layer exchanges between the ranks of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from octavo_registry.cli.errors import BadInput
from octavo_registry.cli.why.question import Question
from octavo_registry.contract.frameworks import ExpertRanks
from octavo_registry.discovery.bridges import framework_record
from octavo_registry.discovery.guard import Fault, guard


def ask_ranks(question: Question, ranks: int) -> Sequence[tuple[str, str]]:
    """What the front end exchanges between ranks; BadInput where its layers stay in a process."""
    framework = question.layer.framework
    record = framework_record(framework)
    bridge: object = None if record is None else record.bridge
    if not isinstance(bridge, ExpertRanks):
        raise BadInput(
            f"--ranks: no front end of {framework} that is installed spreads a MoE layer over ranks; leave --ranks "
            "out, or give --framework torch"
        )
    layer = question.layer
    try:
        return guard(lambda: bridge.explain_exchange(question.recipe, ranks, layer.in_dtype, layer.device))
    except Fault as fault:
        raise BadInput(f"--ranks: {framework} cannot tell what it exchanges ({fault}); leave it out") from fault
