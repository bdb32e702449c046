"""Rollouts as OpenTelemetry traces, sent by OTLP over HTTP: to a collector, MLflow, Phoenix, Langfuse or Weave.

OpenTelemetry's SDK is not used: it makes random ids, and drops what it could not send. Here ids are hashes and the log
on disk is the queue, so a resumed run repeats nothing and loses nothing.

    Trajectory --times, content, scores--> spans --wire--> protobuf --parcels, collector--> HTTP

trace, times, content, scores    values that spans are made of
spans, calls        a rollout as spans of the GenAI conventions
wire                spans and rows as protobuf
parcels, collector  requests of a bounded size; what is repeated, what is lost
settings            OpenTelemetry's environment variables
sink                `OtlpSink`
langfuse, weave, phoenix    services: addresses, keys, and names of their own
"""
