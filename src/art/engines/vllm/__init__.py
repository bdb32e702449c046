"""The vLLM engine. It talks over HTTP to vLLM servers that ART starts, or that already run.

    vllm_engine  implements `art.engine.Engine`: chooses the replica and the adapter, limits the number of requests
    merged       an engine for `weights="merged"`, where the server holds one policy
    replica      HTTP calls to one server, and their answers
    adapters     reads LoRA files, and writes the adapter of zeros
    routing      chooses the replica that has already computed most of a prompt
    start        starts or connects what the settings ask for
    server       starts a server and watches it, through `guard`
    command      command line and environment of a server

All of it runs in the engine's own process (`art.runtime.children.vllm_child`). Nothing here loads torch or vLLM.
"""
