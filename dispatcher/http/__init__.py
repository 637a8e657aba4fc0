"""HTTP/1.1 at protocol level: what stands between a client, the dispatcher and an engine on the path of every token."""
