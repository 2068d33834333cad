"""Settings of the HTTP server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and what it allows. Times are seconds.

    Args:
      host, port: address; port 0 takes a free one.
      uds: path of a Unix socket to listen on instead.
      root_path: prefix that a proxy in front removes from every path.
      ssl_keyfile, ssl_certfile: serve HTTPS.
      api_keys: accepted bearer tokens; empty asks for none.
      allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS.
      max_body_bytes: largest request body.
      max_header_bytes: largest request line and headers.
      max_connections: open connections; one more is answered 503 and closed.
      keep_alive_timeout: how long a connection may stay idle.
      header_timeout: time from the first byte of a request to the end of its headers.
      body_timeout: time to send the body.
      write_timeout: how long a client may leave a full connection unread before it counts as gone.
      request_timeout: time a request may take; None for no limit.
      shutdown_timeout: how long running requests may go on after SIGTERM.
      dev_mode: serve /reset_prefix_cache, /start_profile and /stop_profile.

    Raises:
      ValueError: a field is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_connections: int = 4000
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0
    body_timeout: float = 120.0
    write_timeout: float = 300.0
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    dev_mode: bool = False

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port = {self.port}: must be 0..65535")
        for name in ("max_body_bytes", "max_header_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("keep_alive_timeout", "header_timeout", "body_timeout", "write_timeout", "request_timeout"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")
        if not self.shutdown_timeout >= 0:
            raise ValueError(f"shutdown_timeout = {self.shutdown_timeout}: must be at least 0")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile: give both or none")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path = {self.root_path!r}: must start with / and not end with it")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable():
                raise ValueError("api_keys: a key must be printable ASCII and not empty")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials: needs allowed_origins to be listed, not *")
