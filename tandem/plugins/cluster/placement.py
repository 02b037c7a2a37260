"""The nodes that `cluster.placement` names. Does not know Ray, whose rows of nodes it reads."""

from collections.abc import Sequence
from typing import Any

from tandem.runtime.errors import UserError

NAMES = ("NodeManagerAddress", "NodeName", "NodeManagerHostname", "NodeID")


def named_nodes(nodes: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Return the addresses by id of the living nodes that have one of these names. Raises UserError
    if there is none."""
    alive = [node for node in nodes if node["Alive"]]
    found = [node for node in alive if {node[key] for key in NAMES} & set(names)]
    if found:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in found}
    there = sorted(" = ".join(dict.fromkeys(node[key] for key in NAMES[:3])) for node in alive)
    raise UserError(
        "the Ray cluster has no living node of that name",
        where="cluster.placement",
        found=", ".join(names),
        expected=f"a name of a node: {', '.join(there)}",
        next="start that node (`ray start --address=...`), or name others",
    )
