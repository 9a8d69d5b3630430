"""The stages of an answer, in the order in which they happen.

``question`` (the options, checked), ``runs`` (the model loaded, its step captured or planned, kept for the next
question), with ``retries`` (when a run is made once more) and ``other_ranks`` (the messages of other processes of a
job); ``summarize`` (a run and its replay in an allocator as an estimate), ``causes``, ``verdict``, ``remarks`` (why
figures may be others, how sure it is that a run fits, sentences for the reader); ``stages`` has them in a row,
``ranks`` does so for several processes of a job.
"""
