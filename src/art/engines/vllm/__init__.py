"""The vLLM engine. It talks over HTTP to vLLM servers that ART starts, or that already run.

    vllm_engine  implements `art.engine.Engine`: reads adapters, and chooses replica and adapter; and an engine for
                 `weights="merged"`, where the server holds one policy
    replica      HTTP calls to one server, and their answers
    grammars     proves that a server samples under ART's grammars, and follows each constrained answer
    start        starts a server and watches it, through `guard`, or connects to servers that run already
    command      command line and environment of a server

All of it runs in the engine's own process (`art.worker.vllm_child`). Nothing here loads torch or vLLM.
"""
