"""What the core commands, as a child reads it: every field in its place."""

from __future__ import annotations

import pytest

from shared.wire.frames import whole_dispatch
from supervisor.core.commands import Dispatch
from supervisor.core.types import ChildId, ClaimId
from supervisor.processes.frames_out import dispatch_frame


@pytest.mark.parametrize(("hard_timeout_s", "limit_ms"), [(None, -1), (12.3456, 12_345), (0.0, 0)])
@pytest.mark.parametrize(("headers", "text"), [(None, b""), (b'{"a": 1}', b'{"a": 1}')])
@pytest.mark.parametrize("body", [None, b"", b"[1]"])
def test_a_dispatch_has_every_field_in_its_place(
    hard_timeout_s: float | None, limit_ms: int, headers: bytes | None, text: bytes, body: bytes | None
) -> None:
    """All values differ; read_ct is whatever stands in the row. A limit is rounded down."""
    command = Dispatch(
        child=ChildId(1),
        claim_id=ClaimId(2),
        msg_id=-3,
        attempt=4,
        deliveries=-5,
        enqueued_us=-6,
        hard_timeout_s=hard_timeout_s,
        headers=headers,
        body=body,
        lease_deadline=7.0,
    )
    assert whole_dispatch(dispatch_frame(command)) == (2, -3, 4, -5, -6, limit_ms, text, body)
