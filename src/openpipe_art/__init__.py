"""A client for programs from older articles. It works with the servers, tasks and judges of the package `art`.

    from openpipe_art import ArtClient, ruler_score_group

    client = ArtClient(server_url="http://localhost:5000")
    trajectory = client.run_agent(task="search_emails", prompt='What is the budget of "opal"?')
    client.train(iterations=10)
    print(client.evaluate("search_emails"))

`AsyncArtClient` and `aruler_score_group` do the same for code that runs in an event loop.
"""

from openpipe_art.client import ArtClient, AsyncArtClient, Evaluation
from openpipe_art.judging import aruler_score_group, ruler_score_group

__all__ = ["ArtClient", "AsyncArtClient", "Evaluation", "aruler_score_group", "ruler_score_group"]
