"""The vLLM engine. It talks over HTTP to vLLM servers that ART starts, or that already run.

    vllm_engine  implements `art.engine.Engine`: chooses the replica and the adapter, limits the number of requests;
                 and an engine for `weights="merged"`, where the server holds one policy
    replica      HTTP calls to one server, and their answers
    grammars     proves that a server samples under ART's grammars, and follows each constrained answer
    adapters     reads LoRA files, and writes the adapter of zeros
    routing      chooses the replica that has already computed most of a prompt
    start        starts a server and watches it, through `guard`, or connects to servers that run already
    command      command line and environment of a server

All of it runs in the engine's own process (`art.runtime.children.vllm_child`). Nothing here loads torch or vLLM.
"""
