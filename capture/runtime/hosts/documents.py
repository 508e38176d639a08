"""What the processes of a training say, as one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A list of each process, of its devices or of what they did.
_JOINED = ("measured_peak_bytes_per_device", "waiting_peak_bytes_per_device", "trace")
#: What a process says of itself alone.
_OWN = ("allocator", "resident_set_peak_bytes", "resident_set_before_bytes", "dispatch_seconds")


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the documents of hosts, devices node-major as the plan counts them: host 0's first.

    Args:
        documents: As ``capture.runtime.training.train`` returns them, by host.
    """
    first = documents[0]
    seconds = [document["step_seconds"] for document in documents]
    return first | {
        **{
            name: [each for document in documents for each in document[name] or []]
            for name in _JOINED
            if first[name] is not None
        },
        "ledger_checks": sum(document["ledger_checks"] for document in documents),
        "step_seconds": [max(of_hosts) for of_hosts in zip(*seconds, strict=True)],
        **dict.fromkeys(_OWN),
        "hosts": [
            {
                "num_devices": len(document["measured_peak_bytes_per_device"] or []),
                "ledger_checks": document["ledger_checks"],
                **{name: document[name] for name in _OWN},
            }
            for document in documents
        ],
    }
