"""Other ways to say the same: OpenAI's Responses and Anthropic's Messages, translated to a chat request and back.

    request of a dialect --> ChatRequest --> gateway (tokens, record) --> chat answer --> answer of the dialect

The translations are pure. The recorder sees the exchange that a chat client would have made, so prompt tokens are the
same in every dialect, and a conversation may change from one to another.
"""
