"""The Stores: media that keep records. They know the Store contract and nothing above it."""

if __name__ != "kvtier.storage_backends":
    raise ImportError("this package is imported as kvtier.storage_backends")
