"""A lighter path for plain chat requests inside `model.openai_client()`, which still is an `AsyncOpenAI`.

OpenAI's client spends five to ten times as much CPU time on a request as sending it takes. So `chat.completions.create`
sends a plain request itself, through the same aiohttp session, and everything that is not plain goes through the SDK.
The two cannot drift apart, because the light path knows nothing about the SDK that it has not seen the SDK do:

1. The first plain request of a client goes through the SDK. `handover.py` keeps what it sent: address, headers, time
   limits. Body and answer are compared with what the light path makes of them (`way.py`).
2. Later plain requests are sent with the same address and headers. Only a successful JSON answer is read here.
3. Any other end, an error, another status, a redirect, a cookie, an odd answer, is handed to the SDK as the result of
   its own first attempt. Errors, retries, waits and hooks are the SDK's own from then on.

Whatever changes the client, its HTTP client or a class of the SDK (settings, hooks, tracers, mocks) makes step 1 happen
again, or ends the light path (`untouched.py`).
"""
