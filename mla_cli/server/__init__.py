"""The generator behind the HTTP interface of OpenAI's API; it needs the `serve` extra (see `address.require_server`)."""
