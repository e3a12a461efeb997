"""The adapters against the peers' own functions, each in an environment of its own."""
