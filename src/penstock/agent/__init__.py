"""What runs on a host: custody, sandboxed launch, log shipping, drain, health."""
