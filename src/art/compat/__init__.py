"""Code for programs written for ART 0.3 to 0.5. docs/older_code.md lists what it serves.

settings            the dictionaries of `art.dev`, and older names of settings of `train`
internal_config     `_internal_config`, translated to today's settings
model_fields        fields of `Model` that no longer exist
gather              options of the gather functions that have no effect
checkpoint_names    `backend._experimental_...`
metrics             `model.metrics_builder()` and `track_api_cost`
api_answers         what an answer of a chat API has cost
metrics_state       `state_dict` of the metrics builder
sft_chunks, utils   functions of `art.utils.sft` and `art.utils`
refused             names that no longer exist, each with what to use today
"""
