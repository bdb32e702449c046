"""A client for programs from older articles. It works with the servers, tasks and judges of the package `art`.

    from openpipe_art import ArtClient, ruler_score_group

    client = ArtClient(server_url="http://localhost:5000")
    trajectory = client.run_agent(task="search_emails", prompt='What is the budget of "opal"?')
    client.train(iterations=10)
    print(client.evaluate("search_emails"))

`AsyncArtClient` and `aruler_score_group` do the same for code that runs in an event loop. `openpipe_art.older` has the
spellings of older code that the package `art` asks for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openpipe_art.client import ArtClient, AsyncArtClient, aruler_score_group, ruler_score_group
    from openpipe_art.client import TaskEvaluation as Evaluation

__all__ = ["ArtClient", "AsyncArtClient", "Evaluation", "aruler_score_group", "ruler_score_group"]


def __getattr__(name: str) -> Any:
    """Load the client when it is used: `art` itself loads this package for an older spelling."""
    if name not in __all__:
        raise AttributeError(f"module 'openpipe_art' has no attribute {name!r}")
    from openpipe_art import client

    return getattr(client, "TaskEvaluation" if name == "Evaluation" else name)
