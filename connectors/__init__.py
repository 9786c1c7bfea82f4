"""Adapters between serving engines and a kvtier Cache."""

if __name__ != "kvtier.connectors":
    raise ImportError("this package is imported as kvtier.connectors")
