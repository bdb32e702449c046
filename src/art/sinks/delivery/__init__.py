"""Delivery: reads the local log of a model and feeds its sinks, each in a thread of its own.

choose      which sinks a model has: from `report_metrics`, or from the environment
reporting   all sinks of one model: started together, asked for their state, closed
worker      the thread of one sink: deliver, retry, close
log_reader  the deliveries that a sink has not had yet, in order
cursor      how far a sink has read, in a file beside the log
"""
