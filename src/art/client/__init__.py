"""The user's side of an ART server: `client` has its endpoints, `http` the requests that outlast a restart of it."""
