"""Other chat APIs (OpenAI's Responses, Anthropic's Messages), translated to a chat request and back.

    request of a dialect --> ChatRequest --> gateway (tokens, record) --> chat answer --> answer of the dialect

The translations are pure functions. The exchange is recorded as if a chat client had made it, so all dialects give the
same prompt tokens, and a conversation may switch between them.
"""
