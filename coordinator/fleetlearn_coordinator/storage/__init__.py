"""What survives the coordinator's death: a ledger (rows) and blobs (bytes), and the order in which
both are written."""
