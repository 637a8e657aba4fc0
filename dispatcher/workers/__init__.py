"""Several processes behind one port, with one ledger: docs/decisions/0011-workers-share-memory.md."""
