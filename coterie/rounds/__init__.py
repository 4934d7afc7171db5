"""Parts of a round: the exchange, its phases, the evaluation, and the client registry."""
