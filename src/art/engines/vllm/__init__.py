"""The vLLM engine. It talks over HTTP to a vLLM server that ART starts, or that already runs.

    vllm_engine  implements `art.engine.Engine`: reads adapters, and names them on the server; and an engine for
                 `weights="merged"`, where the server holds one policy
    replica      HTTP calls to one server, and their answers
    grammars     proves that a server samples under ART's grammars, and follows each constrained answer
    start        starts a server and watches it, through `guard`, or connects to one that runs already
    command      command line and environment of a server

All of it runs in the engine's own process (`art.worker.vllm_child`). Nothing here loads torch or vLLM.
"""
