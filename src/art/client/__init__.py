"""The HTTP client of an ART server.

client   one typed method per endpoint: `ArtClient`
http     requests that outlast a restart of the server
jobs     submitting a job and following it to its end, by its events
"""

from art.client.client import ArtClient

__all__ = ["ArtClient"]
