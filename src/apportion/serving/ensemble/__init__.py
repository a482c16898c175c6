"""The answer of several members: deadline, quorum, aggregation, and the request that is pending."""
