"""The production side: an OpenAI-compatible server in front of vLLM engines that carries out a policy's decisions."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.dispatcher, not dispatcher")
