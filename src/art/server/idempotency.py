"""Read a request for a job, whose id makes it run only once."""

from __future__ import annotations

from art.errors import InvalidRequestError
from art.server.call import Call, W


async def job_request(call: Call, kind: type[W]) -> W:
    """Read the request for a job. The id is in the body, or in the header `Idempotency-Key`."""
    body = await call.json()
    header = next((value.decode("latin-1") for key, value in call.scope["headers"] if key == b"idempotency-key"), None)
    if header is not None and isinstance(body, dict) and body.setdefault("job_id", header) != header:
        raise InvalidRequestError(
            f"the header Idempotency-Key says {header!r} and `job_id` says {body['job_id']!r}; leave one out",
            param="job_id",
        )
    return kind.model_validate(body)
