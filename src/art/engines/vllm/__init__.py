"""vLLM as an engine: servers that ART starts, or that run already, spoken to over HTTP.

    engine      the `art.engine.Engine`: which replica, which adapter, how many requests
    replica     HTTP calls of one server, and what its answers mean
    adapters    LoRA files: what they hold, and the adapter of zeros
    routing     which replica has computed most of a prompt already
    server      starts a server and watches it, through `guard`
    command     the flags and the environment of a server

All of it lives in the engine's own process (`art.runtime.children.vllm_child`); nothing here loads torch or vLLM.
"""
